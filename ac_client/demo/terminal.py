"""Print the rows of the demo with bars for peak and time, and the promises below."""

from __future__ import annotations

from rich import box
from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ac_client.demo.comparison import DemoComparison, Line

MIB = 1 << 20
BAR_WIDTH = 24
COLORS = {"plain": "bright_black", "checkpoint": "yellow", "ours": "green"}


def render(comparison: DemoComparison) -> RenderableType:
    """Render the rows, their bars and the promises."""
    highest = max(line.measured.peak_bytes for line in comparison.lines)
    slowest = max(line.measured.slowdown for line in comparison.lines)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("peak MiB", justify="right")
    table.add_column("")
    table.add_column("step time / plain", justify="right")
    table.add_column("")
    for line in comparison.lines:
        measured, color = line.measured, COLORS[line.row.method]
        table.add_row(
            line.row.name,
            mib(measured.peak_bytes),
            Bar(highest, 0, measured.peak_bytes, width=BAR_WIDTH, color=color),
            slowdown(line),
            Bar(slowest, 0, measured.slowdown, width=BAR_WIDTH, color=color),
            style="bold" if line.row.method == "ours" else None,
        )
    return Group(Text(comparison.setting.describe()), table, Text(facts(comparison)), *_checks(comparison))


def facts(comparison: DemoComparison) -> str:
    """Say in one line what the rows do not show."""
    first_steps = [line.measured.first_steps_s for line in comparison.lines if line.measured.first_steps_s]
    observed, planned = (max(seconds) for seconds in zip(*first_steps, strict=True))
    return (
        f"first step of autoac, observed: {observed:.1f} s; second step, with its plan: {planned:.1f} s; "
        f"plain step: {comparison.lines[0].measured.step_s:.2f} s; all rows: {comparison.seconds:.0f} s"
    )


def mib(nbytes: int | None) -> str:
    """Format bytes in MiB; None as an empty text."""
    return "" if nbytes is None else f"{nbytes / MIB:.1f}"


def slowdown(line: Line) -> str:
    """Format the step time as a multiple of the plain one."""
    return "1.00" if line.row.method == "plain" else f"{line.measured.slowdown:.2f}"


def gradients(line: Line) -> str:
    """Say if the gradients equal those of plain; empty for plain itself."""
    return "" if line.row.method == "plain" else "yes" if line.measured.gradients_equal else "NO"


def _checks(comparison: DemoComparison) -> list[Text]:
    lines = []
    for check in comparison.checks:
        mark = Text("ok   ", style="green") if check.kept else Text("MISS ", style="bold red")
        lines.append(mark + Text(f"{check.promise}: {check.found}"))
    return lines
