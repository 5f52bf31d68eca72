"""Write rows and memory timelines as one HTML file that makes no network requests: uPlot is inlined."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from ac_client.demo.comparison import Demo, Line, ModelComparison
from ac_client.demo.terminal import facts, gradients, heading, mib, time_over_plain
from ac_client.measure.quartiles import Quartiles
from autoac.planner.report.page import page, read

COLUMNS = ("row", "peak MiB", "step time / plain", "gradients equal", "budget MiB", "predicted MiB")
KEPT = {True: "kept", None: "cannot tell", False: "MISSED"}


def render_page(demo: Demo) -> str:
    """Return the page: memory over one step for every row, the tables, and the promises."""
    own = files("ac_client.demo")
    return page(
        own.joinpath("page.html").read_text("utf-8"),
        styles=[read("timeline.css")],
        scripts=[read("parts.js"), own.joinpath("page.js").read_text("utf-8")],
        parts={
            "FACTS": html.escape(facts(demo)),
            "MODELS": "\n".join(map(_model, demo.models)),
            "HEADING": html.escape(heading(demo.batches)),
            "BATCHES": _table(
                ("row", "largest batch", "peak MiB"),
                [(one.row.name, str(one.samples), mib(one.peak_bytes)) for one in demo.batches.rows],
            ),
            "CHECKS": "\n".join(
                f"<li>{KEPT[check.kept]}: {html.escape(check.promise)}: "
                f"<b>{html.escape(check.found)}</b></li>"
                for check in demo.checks
            ),
        },
        data=[[_series(line, model) for line in model.lines] for model in demo.models],
    )


def cells(line: Line, model: ModelComparison) -> list[str]:
    """Format one row of the table, in the order of `COLUMNS`."""
    return [
        line.row.name,
        mib(line.peak_bytes),
        time_over_plain(line, model),
        gradients(line, model),
        mib(line.row.budget_bytes),
        mib(line.predicted_peak_bytes),
    ]


def _series(line: Line, model: ModelComparison) -> dict[str, Any]:
    """Return a row's memory over its step time, which is the table's multiple of plain's.

    The profiler, which reports the memory, slows each row by another factor.
    """
    times = [ms for ms, _ in line.memory.timeline]
    plain_ms = Quartiles.of([step.cpu_s for step in model.plain.steps]).median * 1e3
    step_ms = plain_ms * line.time_over(model.plain).median
    scale = step_ms / times[-1] if times and times[-1] > 0 else 1.0
    return {
        "name": line.row.name,
        "budget": line.row.budget_bytes,
        "ms": [ms * scale for ms in times],
        "bytes": [live for _, live in line.memory.timeline],
    }


def _model(model: ModelComparison) -> str:
    table = _table(COLUMNS, [cells(line, model) for line in model.lines])
    title = html.escape(model.setting.describe())
    return f'<section>\n<h2>{title}</h2>\n<div class="memory"></div>\n{table}\n</section>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return (
        '<div class="scroll" tabindex="0" role="group" aria-label="Rows"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
    )
