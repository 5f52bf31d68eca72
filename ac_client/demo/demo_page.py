"""Write rows and memory timelines as one HTML file that makes no network requests: uPlot is inlined."""

from __future__ import annotations

import html
from importlib.resources import files
from typing import Any

from ac_client.demo.comparison import DemoComparison, Line
from ac_client.demo.terminal import facts, gradients, mib, time_over_plain
from ac_client.measure.quartiles import Quartiles
from autoac.planner.report.page import page, read

COLUMNS = ("row", "budget MiB", "predicted MiB", "peak MiB", "step time / plain", "gradients equal")
KEPT = {True: "kept", None: "cannot tell", False: "MISSED"}


def render_page(comparison: DemoComparison) -> str:
    """Return the page: memory over one step for every row, the table, and the promises."""
    own = files("ac_client.demo")
    return page(
        own.joinpath("page.html").read_text("utf-8"),
        styles=[read("timeline.css")],
        scripts=[read("parts.js"), own.joinpath("page.js").read_text("utf-8")],
        parts={
            "SETTING": html.escape(comparison.setting.describe()),
            "FACTS": html.escape(facts(comparison)),
            "TABLE": _table(comparison),
            "CHECKS": "\n".join(
                f"<li>{KEPT[check.kept]}: {html.escape(check.promise)}: "
                f"<b>{html.escape(check.found)}</b></li>"
                for check in comparison.checks
            ),
        },
        data=[_series(line, comparison) for line in comparison.lines],
    )


def cells(line: Line, comparison: DemoComparison) -> list[str]:
    """Format one row of the table, in the order of `COLUMNS`."""
    return [
        line.row.name,
        mib(line.budget_bytes),
        mib(line.predicted_peak_bytes),
        mib(line.peak_bytes),
        time_over_plain(line, comparison),
        gradients(line, comparison),
    ]


def _series(line: Line, comparison: DemoComparison) -> dict[str, Any]:
    """Return a row's memory over its step time, which is the table's multiple of plain's.

    The profiler, which reports the memory, slows each row by another factor.
    """
    times = [ms for ms, _ in line.memory.timeline]
    plain_ms = Quartiles.of([step.cpu_s for step in comparison.plain.steps]).median * 1e3
    step_ms = plain_ms * line.time_over(comparison.plain).median
    scale = step_ms / times[-1] if times and times[-1] > 0 else 1.0
    return {
        "name": line.row.name,
        "budget": line.budget_bytes,
        "ms": [ms * scale for ms in times],
        "bytes": [live for _, live in line.memory.timeline],
    }


def _table(comparison: DemoComparison) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(line, comparison)) + "</tr>"
        for line in comparison.lines
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>"
