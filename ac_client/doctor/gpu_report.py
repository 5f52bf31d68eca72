"""Define the doctor's findings and its report, as Markdown and as JSON.

A report is meant to be attached to an issue. It names versions and the device, and neither hosts nor paths.
"""

from __future__ import annotations

import json
import re
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import PurePath

FORMAT = "autoac.gpu-report"
VERSION = 1
_FRAMES = 6  # of a traceback, the innermost
_PATH = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][\w.@+~-]+){2,}[\\/]?")


class Result(StrEnum):
    """Verdicts on what a check found."""

    OK = "ok"
    NOTE = "note"  # neither right nor wrong, but worth reading
    SKIPPED = "skipped"
    WRONG = "WRONG"


@dataclass(frozen=True, slots=True)
class GpuFinding:
    """A line of the doctor's report: what one check found."""

    check: str  # "event tree", "GPT-2-like, bf16: peak"
    verdict: Result
    text: str
    figures: Mapping[str, float | int | str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuReport:
    """Everything that the doctor found on one GPU."""

    machine: Mapping[str, str]  # versions, device, driver
    findings: Sequence[GpuFinding]

    @property
    def failed(self) -> bool:
        """Return True if something is wrong."""
        return any(finding.verdict is Result.WRONG for finding in self.findings)

    def to_json(self) -> str:
        """Return the report as a JSON object."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            "ok": not self.failed,
            "machine": dict(self.machine),
            "findings": [asdict(finding) for finding in self.findings],
        }
        return json.dumps(data, indent=1) + "\n"

    def to_markdown(self) -> str:
        """Return the report as a page: what is wrong first, then the machine, then every finding."""
        counts = {v: sum(f.verdict is v for f in self.findings) for v in Result}
        lines = ["# autoac doctor --gpu", ""]
        lines.append(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()) + ".")
        wrong = [finding for finding in self.findings if finding.verdict is Result.WRONG]
        if wrong:
            lines += ["", "## Wrong", ""]
            lines += [f"- **{finding.check}**: {finding.text}" for finding in wrong]
        lines += ["", "## Machine", "", "| | |", "| --- | --- |"]
        lines += [f"| {name} | {_cell(value)} |" for name, value in self.machine.items()]
        lines += ["", "## Checks", "", "| check | verdict | found |", "| --- | --- | --- |"]
        lines += [f"| {f.check} | {f.verdict.value} | {_cell(f.text)} |" for f in self.findings]
        return "\n".join(lines) + "\n"


def finding_of_error(check: str, error: BaseException) -> GpuFinding:
    """Return the finding for a check that raised `error`, with the innermost frames by file name."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    where = " > ".join(f"{PurePath(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
    message = " ".join(str(error).split())[:600]
    text = redacted(f"{type(error).__name__}: {message} (in {where})")
    return GpuFinding(check, Result.WRONG, text)


def redacted(text: str) -> str:
    """Return `text` without the name of this host, and with the last part of each path alone."""
    text = _PATH.sub(lambda match: PurePath(match[0]).name, text)
    for name in {socket.gethostname(), socket.gethostname().partition(".")[0]}:
        text = re.sub(rf"\b{re.escape(name)}\b", "<host>", text)
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")
