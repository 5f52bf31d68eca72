"""Print the rows of the demo with bars for peak and time, and the promises below."""

from __future__ import annotations

from rich import box
from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ac_client.demo.comparison import DemoComparison, Line
from ac_client.measure.quartiles import Quartiles

MIB = 1 << 20
BAR_WIDTH = 24
COLORS = {"plain": "bright_black", "checkpoint": "yellow", "ours": "green"}


def render(comparison: DemoComparison) -> RenderableType:
    """Render the rows, their bars and the promises."""
    highest = max(line.peak_bytes for line in comparison.lines)
    times = [line.time_over(comparison.plain).median for line in comparison.lines]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("peak MiB", justify="right")
    table.add_column("")
    table.add_column("step time / plain", justify="right")
    table.add_column("")
    for line, ratio in zip(comparison.lines, times, strict=True):
        color = COLORS[line.row.method]
        table.add_row(
            line.row.name,
            mib(line.peak_bytes),
            Bar(highest, 0, line.peak_bytes, width=BAR_WIDTH, color=color),
            time_over_plain(line, comparison),
            Bar(max(times), 0, ratio, width=BAR_WIDTH, color=color),
            style="bold" if line.row.method == "ours" else None,
        )
    return Group(Text(comparison.setting.describe()), table, Text(facts(comparison)), *_checks(comparison))


def facts(comparison: DemoComparison) -> str:
    """Say in one line what the rows do not show."""
    first_steps = [line.memory.first_steps for line in comparison.ours]
    observed, planned = (max(step.cpu_s for step in steps) for steps in zip(*first_steps, strict=True))
    plain = Quartiles.of([step.cpu_s for step in comparison.plain.steps]).median
    return (
        f"CPU time of one thread: {plain:.2f} s for a plain step, {observed:.1f} s for autoac's first, "
        f"observed one, {planned:.1f} s for its second, with the plan; "
        f"{len(comparison.plain.steps)} turns, {comparison.seconds:.0f} s in all"
    )


def mib(nbytes: int | None) -> str:
    """Format bytes in MiB; None as an empty text."""
    return "" if nbytes is None else f"{nbytes / MIB:.1f}"


def time_over_plain(line: Line, comparison: DemoComparison) -> str:
    """Format the step time as a multiple of the plain one: the median, and its interval."""
    return "1.00" if line is comparison.plain else str(line.time_over(comparison.plain))


def gradients(line: Line, comparison: DemoComparison) -> str:
    """Say if the gradients equal those of plain; empty for plain itself."""
    return "" if line is comparison.plain else "yes" if all(line.equal_steps(comparison.plain)) else "NO"


MARKS = {True: ("ok   ", "green"), None: (" ?   ", "yellow"), False: ("MISS ", "bold red")}


def _checks(comparison: DemoComparison) -> list[Text]:
    return [Text(*MARKS[check.kept]) + Text(f"{check.promise}: {check.found}") for check in comparison.checks]
