"""The demo's result for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ac_client.demo.demo import Demo, Line, checks

MIB = 1 << 20


def cells(line: Line) -> list[str]:
    """One row of the table as text, in the order of `COLUMNS`."""
    row, measured = line.row, line.measured
    return [
        row.name,
        _mib(row.budget_bytes),
        _mib(measured.predicted_peak_bytes),
        _mib(measured.peak_bytes),
        f"{line.recompute_us / 1e3:.0f} ms",
        "1.00" if row.method == "plain" else f"{measured.slowdown:.2f}",
        "" if row.method == "plain" else "yes" if measured.gradients_equal else "NO",
        "" if measured.plan_s is None else f"{measured.plan_s:.1f} s",
    ]


COLUMNS = (
    "row",
    "budget MiB",
    "predicted peak MiB",
    "measured peak MiB",
    "recompute, predicted",
    "step time / plain",
    "gradients equal",
    "plan time",
)


def render(demo: Demo) -> RenderableType:
    """The table, and the promises below it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for line in demo.lines:
        style = "bold" if line.row.method == "ours" else None
        table.add_row(*cells(line), style=style)
    notes = [Text(demo.setting.describe()), Text(render_facts(demo)), Text()]
    for check in checks(demo):
        mark = Text("ok   ", style="green") if check.kept else Text("MISS ", style="bold red")
        notes.append(mark + Text(f"{check.promise}: {check.found}"))
    return Group(table, *notes)


def render_facts(demo: Demo) -> str:
    """What the table does not show, in one line."""
    return (
        f"smallest feasible peak: {_mib(demo.floor.found)} MiB found, {_mib(demo.floor.proven)} MiB proven; "
        f"plain step {demo.lines[0].measured.step_s:.2f} s; {demo.seconds:.0f} s in all"
    )


def render_checks(demo: Demo) -> str:
    """The promises as Markdown."""
    marks = {True: "kept", False: "**missed**"}
    return "\n".join(f"- {marks[check.kept]}: {check.promise}: {check.found}" for check in checks(demo))


def markdown(demo: Demo) -> str:
    """The table as Markdown, for the README."""
    lines = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *(cells(line) for line in demo.lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / MIB:.1f}"
