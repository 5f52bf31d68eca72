"""Write rows and memory timelines as one HTML file that makes no network requests: uPlot is inlined."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from ac_client.demo.comparison import PLAIN, DemoComparison, Line
from ac_client.demo.terminal import facts, gradients, mib, slowdown
from autoac.planner.report.page import page, read

COLUMNS = ("row", "budget MiB", "predicted MiB", "peak MiB", "step time / plain", "gradients equal")


def render_page(comparison: DemoComparison) -> str:
    """Return the page: memory over one step for every row, the table, and the promises."""
    plain_ms = comparison.line(PLAIN).measured.step_s * 1e3
    own = files("ac_client.demo")
    return page(
        own.joinpath("page.html").read_text("utf-8"),
        styles=[read("timeline.css")],
        scripts=[read("parts.js"), own.joinpath("page.js").read_text("utf-8")],
        parts={
            "SETTING": html.escape(comparison.setting.describe()),
            "FACTS": html.escape(facts(comparison)),
            "TABLE": _table(comparison.lines),
            "CHECKS": "\n".join(
                f"<li>{'kept' if check.kept else 'MISSED'}: {html.escape(check.promise)}: "
                f"<b>{html.escape(check.found)}</b></li>"
                for check in comparison.checks
            ),
        },
        data=[_series(line, plain_ms) for line in comparison.lines],
    )


def cells(line: Line) -> list[str]:
    """Format one row of the table, in the order of `COLUMNS`."""
    row, measured = line.row, line.measured
    return [
        row.name,
        mib(row.budget_bytes),
        mib(line.predicted_peak_bytes),
        mib(measured.peak_bytes),
        slowdown(line),
        gradients(line),
    ]


def _series(line: Line, plain_ms: float) -> dict[str, Any]:
    """Return a row's memory over its measured step time, which is the table's multiple of plain's.

    The profiler, which reports the memory, slows each row by another factor.
    """
    times = [ms for ms, _ in line.measured.timeline]
    scale = plain_ms * line.measured.slowdown / times[-1] if times and times[-1] > 0 else 1.0
    return {
        "name": line.row.name,
        "method": line.row.method,
        "budget": line.row.budget_bytes,
        "ms": [ms * scale for ms in times],
        "bytes": [live for _, live in line.measured.timeline],
    }


def _table(lines: Sequence[Line]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(line)) + "</tr>" for line in lines
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>"
