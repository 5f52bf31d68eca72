"""The demo's result as one HTML file that asks the network for nothing: uPlot is inlined."""

from __future__ import annotations

import html
from importlib.resources import files
from typing import Any

from ac_client.demo.demo import Demo, checks
from ac_client.demo.table import COLUMNS, cells, render_facts
from autoac.planner.report.page import embedded, fill, read


def render_page(demo: Demo) -> str:
    """The page: memory over one step for every row, the table, and what was promised."""
    parts = {
        "UPLOT_CSS": read("vendor/uPlot.min.css"),
        "UPLOT_JS": read("vendor/uPlot.iife.min.js"),
        "UPLOT_LICENSE": html.escape(read("vendor/uPlot.LICENSE")),
        "SETTING": html.escape(demo.setting.describe()),
        "FACTS": html.escape(render_facts(demo)),
        "TABLE": _table(demo),
        "CHECKS": "\n".join(
            f'<li class="{"kept" if check.kept else "missed"}">{html.escape(check.promise)}: '
            f"<b>{html.escape(check.found)}</b></li>"
            for check in checks(demo)
        ),
        "DATA": embedded(_series(demo)),
    }
    return fill(files("ac_client.demo").joinpath("page.html").read_text("utf-8"), parts)


def _series(demo: Demo) -> list[dict[str, Any]]:
    return [
        {
            "name": line.row.name,
            "method": line.row.method,
            "budget": line.row.budget_bytes,
            "ms": [ms for ms, _ in line.measured.timeline],
            "bytes": [live for _, live in line.measured.timeline],
        }
        for line in demo.lines
    ]


def _table(demo: Demo) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    rows = "\n".join(
        f'<tr class="{line.row.method}">'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(line))
        + "</tr>"
        for line in demo.lines
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>"
