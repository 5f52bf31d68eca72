"""Print the rows of the demo with bars for peak and time, and the promises below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ac_client.demo.comparison import Demo, Line, ModelComparison
from ac_client.demo.largest_batch import LargestBatch, LargestBatches

COLORS = {"plain": "bright_black", "checkpoint": "yellow", "ours": "green"}


def render(demo: Demo) -> RenderableType:
    """Render the rows of each model and the largest batches, with bars, and the promises."""
    parts: list[RenderableType] = []
    for model in demo.models:
        ratios = [line.time_over(model.plain).median for line in model.lines]
        texts = [time_over_plain(line, model) for line in model.lines]
        table = _table("step time / plain", model.lines, texts, ratios)
        parts += [Text(model.setting.describe()), table]
    sizes = [one.samples for one in demo.batches.rows]
    table = _table("largest batch", demo.batches.rows, map(str, sizes), sizes)
    parts += [Text(heading(demo.batches)), table, Text(facts(demo))]
    return Group(*parts, *_checks(demo))


def _table(
    column: str, rows: Sequence[Line | LargestBatch], texts: Iterable[str], values: Sequence[float]
) -> Table:
    """Return the rows with their peaks, and what `column` says of each, with bars."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(("", "peak MiB", "", column, "")):
        table.add_column(name, justify="right" if name else "left", no_wrap=number == 0)
    highest, most = max(row.peak_bytes for row in rows), max(values)
    for one, text, value in zip(rows, texts, values, strict=True):
        color, style = COLORS[one.row.method], "bold" if one.row.method == "ours" else None
        memory = Bar(highest, 0, one.peak_bytes, width=24, color=color)
        bar = Bar(most, 0, value, width=24, color=color)
        table.add_row(one.row.name, mib(one.peak_bytes), memory, text, bar, style=style)
    return table


def heading(batches: LargestBatches) -> str:
    """Say what the largest batches are of."""
    model = batches.setting.describe().partition(", batch")[0]
    return f"The largest batch in {mib(batches.budget_bytes)} MiB, by autoac fit and real steps: {model}"


def facts(demo: Demo) -> str:
    """Say in one line what the rows do not show."""
    first_steps = [[step.cpu_s for step in model.ours.memory.first_steps] for model in demo.models]
    observed, planned = map(max, zip(*first_steps, strict=True))
    return (
        f"autoac's first step, observed: at most {observed:.1f} s of CPU; its second, with the plan: "
        f"{planned:.1f} s; {len(demo.models[0].plain.steps)} turns, {demo.seconds:.0f} s in all"
    )


def mib(nbytes: int | None) -> str:
    """Format bytes in MiB; None as an empty text."""
    return "" if nbytes is None else f"{nbytes / 2**20:.1f}"


def time_over_plain(line: Line, model: ModelComparison) -> str:
    """Format the step time as a multiple of the plain one: the median, and its interval."""
    return "1.00" if line is model.plain else str(line.time_over(model.plain))


def gradients(line: Line, model: ModelComparison) -> str:
    """Say if the gradients equal those of plain; empty for plain itself."""
    return "" if line is model.plain else "yes" if all(line.equal_steps(model.plain)) else "NO"


MARKS = {True: ("ok   ", "green"), None: (" ?   ", "yellow"), False: ("MISS ", "bold red")}


def _checks(demo: Demo) -> list[Text]:
    return [Text(*MARKS[check.kept]) + Text(f"{check.promise}: {check.found}") for check in demo.checks]
