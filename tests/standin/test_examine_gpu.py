"""Run the doctor's checks on the stand-in, with tiny models."""

from __future__ import annotations

import functools
import json
import socket
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ac_client.cli.main import main
from ac_client.doctor import examine_gpu as examination
from ac_client.doctor import gpu_checks
from ac_client.doctor.gpu_checks import (
    check_capture,
    check_event_tree,
    checks_of,
    run_check,
)
from ac_client.doctor.gpu_report import GpuFinding, Result
from ac_client.doctor.sample_models import SAMPLES, TINY
from ac_client.doctor.sample_training import Case

# One precision of each model keeps this short; `autoac doctor --gpu` runs both.
CASES = ("GPT-2-like, fp32", "Llama-like, bf16", "ViT-like, fp32", "ResNet-50-like, bf16")
MORE = ("Custom parts, fp32", "Custom parts, bf16")
CHECKS = (
    "event tree",
    "attention*",
    *CASES,
    *MORE,
    "wide layer",
    "profiler",
    "overhead",
    "two*",
)
CUDA = torch.device("cuda", 0)


class Ran:
    """One run of the command."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "report.md"
            patterns = [word for check in CHECKS for word in ("--only", check)]
            with pytest.raises(SystemExit) as ended:
                main(["doctor", "--gpu", "--size", "tiny", "--out", str(out), *patterns])
            self.code = ended.value.code
            self.page = out.read_text()
            self.data: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())

    def verdicts(self, part: str) -> dict[str, str]:
        """Return the verdicts of checks whose name ends with `part`."""
        return {f["check"]: f["verdict"] for f in self.data["findings"] if f["check"].endswith(part)}

    def figures(self, check: str) -> dict[str, Any]:
        found: dict[str, Any] = next(f["figures"] for f in self.data["findings"] if f["check"] == check)
        return found


@functools.cache
def ran() -> Ran:
    return Ran()


def test_event_tree_is_complete(gpu: ModuleType) -> None:
    assert ran().verdicts("event tree") == {"event tree": "ok"}


def test_peaks_of_all_models_are_predicted_to_the_byte(gpu: ModuleType) -> None:
    for part in (": plain peak", ": planned peak"):
        assert ran().verdicts(part) == {f"{case}{part}": "ok" for case in (*CASES, *MORE)}
    for case in (*CASES, *MORE):
        planned, plain = (ran().figures(f"{case}: {way} peak") for way in ("planned", "plain"))
        assert planned["measured"] == planned["predicted"] <= planned["budget"] < plain["measured"]


def test_gradients_equal_those_of_plain_with_ops_recomputed(gpu: ModuleType) -> None:
    every = (*CASES, *MORE)
    assert ran().verdicts(": gradients") == {f"{case}: gradients": "ok" for case in every}
    assert all(ran().figures(f"{case}: gradients")["recomputed"] > 0 for case in every)


def test_exit_code_says_if_something_is_wrong(gpu: ModuleType) -> None:
    wrong = [f["check"] for f in ran().data["findings"] if f["verdict"] == "WRONG"]
    assert ran().code == (1 if wrong else 0)
    assert ran().data["ok"] == (not wrong)


def test_ops_are_those_that_fake_steps_predict(gpu: ModuleType) -> None:
    assert ran().verdicts(": ops") == {f"{case}: ops": "ok" for case in (*CASES, *MORE, "wide layer, bf16")}
    attention = {
        f["check"]: f["verdict"] for f in ran().data["findings"] if f["check"].startswith("attention")
    }
    assert len(attention) == 2 * 14  # of each, the kernel and its recompute
    assert set(attention.values()) == {"ok"}


def test_what_cannot_be_checked_is_skipped_or_noted(gpu: ModuleType) -> None:
    assert ran().verdicts("two GPUs") == {"two GPUs": "skipped"}
    assert set(ran().verdicts("time").values()) == {"note"}, "times mean nothing here"
    assert set(ran().verdicts("overhead").values()) == {"note"}
    assert ran().verdicts("profiler") == {"profiler": "note"}, "the stand-in has no trace of its own"


def test_report_names_versions_and_neither_host_nor_paths(gpu: ModuleType) -> None:
    page = ran().page
    assert f"| torch | {torch.__version__} |" in page
    assert "| device | Stand-in GPU |" in page
    assert socket.gethostname() not in page
    assert str(Path(__file__).parents[2]) not in page
    assert "/site-packages/" not in page


def test_failing_check_keeps_its_findings_and_does_not_stop_the_rest(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails() -> Iterator[GpuFinding]:
        yield GpuFinding("first part", Result.OK, "done")
        torch.empty(1 << 60, device="cuda")

    def works() -> Iterator[GpuFinding]:
        yield GpuFinding("works", Result.OK, "done")

    monkeypatch.setattr(examination, "checks_of", lambda *_: {"fails": fails, "works": works})
    out = tmp_path / "report.md"
    report = examination.examine_gpu("tiny", lambda *_: None, out)
    assert [(f.check, f.verdict) for f in report.findings] == [
        ("first part", Result.OK),
        ("fails", Result.WRONG),
        ("works", Result.OK),
    ]
    assert report.failed
    assert "OutOfMemoryError" in report.findings[1].text
    assert "test_examine_gpu.py:" in report.findings[1].text
    assert out.read_text() == report.to_markdown()


def test_incomplete_event_tree_is_found(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lossy(gpu_checks.AllocatorTimeline):
        def _read(self, trace: Any) -> None:
            super()._read(trace)
            self.events = self.events[:-1]

    monkeypatch.setattr(gpu_checks, "AllocatorTimeline", Lossy)
    found = list(run_check("event tree", lambda: check_event_tree(Case(SAMPLES[0], "fp32", TINY, CUDA))))
    assert [f.verdict for f in found] == [Result.WRONG]


@pytest.mark.parametrize(("refuses", "verdict"), [(True, Result.OK), (False, Result.WRONG)])
def test_first_step_must_be_refused_while_it_is_captured(
    gpu: ModuleType, refuses: bool, verdict: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: refuses)
    (found,) = check_capture(Case(SAMPLES[0], "fp32", TINY, CUDA))
    assert found.verdict is verdict


def test_cudnn_benchmark_is_on_while_its_model_trains(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []

    def check(case: Case) -> Iterator[GpuFinding]:
        seen.append((case.name, torch.backends.cudnn.benchmark))
        yield GpuFinding(case.name, Result.OK, "")

    monkeypatch.setattr(gpu_checks, "check_case", check)
    list(checks_of(CUDA, TINY)["cudnn.benchmark"]())
    assert seen == [("ResNet-50-like, cudnn.benchmark, fp32", True)]
    assert not torch.backends.cudnn.benchmark


def test_no_check_begins_when_the_time_is_up(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = iter([0.0, 0.0, examination.LIMIT_S + 1])
    monkeypatch.setattr(examination.time, "monotonic", lambda: next(clock))
    written: list[int] = []

    def works() -> Iterator[GpuFinding]:
        for part in ("first", "second"):
            yield GpuFinding(part, Result.OK, "done")
            written.append(len(json.loads((tmp_path / "report.json").read_text())["findings"]))

    monkeypatch.setattr(examination, "checks_of", lambda *_: {"in time": works, "late": works})
    report = examination.examine_gpu("tiny", lambda *_: None, tmp_path / "report.md")
    assert written == [1, 2], "the report is written after each finding"
    assert [(f.check, f.verdict) for f in report.findings] == [
        ("first", Result.OK),
        ("second", Result.OK),
        ("late", Result.SKIPPED),
    ]
