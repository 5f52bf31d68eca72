"""Run all checks on the current GPU. The report is written after each finding, so a crash loses none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from ac_client.doctor.device_facts import machine_facts
from ac_client.doctor.gpu_checks import checks_of, run_check
from ac_client.doctor.gpu_report import GpuFinding, GpuReport, Result
from ac_client.doctor.sample_models import SIZES
from ac_client.errors import CommandError
from ac_client.files import write_whole

LIMIT_S = 30 * 60.0  # no check begins later, so that the run ends within 40 minutes


def examine_gpu(
    size: str, on_check: Callable[[str, int, int], object], out: Path, only: Sequence[str] = ()
) -> GpuReport:
    """Check the current GPU.

    Args:
        size: a key of `SIZES`.
        on_check: called with name, position and number of checks before each check.
        out: file of the report in Markdown; the one in JSON gets the suffix `.json`.
        only: patterns of the checks to run, such as `*bf16`; by default all.

    Raises:
        CommandError: torch found no GPU, or a pattern matches no check.
        OSError: the report cannot be written.
    """
    if not torch.cuda.is_available():
        cuda, hip = torch.version.cuda, torch.version.hip
        built = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "none"
        raise CommandError(
            f"doctor --gpu needs a GPU, got none: torch {torch.__version__} is built for {built}"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    machine, findings = machine_facts(device), list[GpuFinding]()
    checks = checks_of(device, SIZES[size])
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in checks):
            raise CommandError(f"--only must match one of: {'; '.join(checks)}; got {pattern!r}")
    if only:
        checks = {name: checks[name] for name in checks if any(fnmatchcase(name, one) for one in only)}
    ends = time.monotonic() + LIMIT_S
    for i, (name, check) in enumerate(checks.items()):
        on_check(name, i, len(checks))
        late = GpuFinding(name, Result.SKIPPED, f"the checks before it took {LIMIT_S / 60:.0f} minutes")
        for finding in [late] if time.monotonic() > ends else run_check(name, check):
            findings.append(finding)
            report = GpuReport(machine, tuple(findings))
            write_whole(out, report.to_markdown())
            write_whole(out.with_suffix(".json"), report.to_json())
    return report
