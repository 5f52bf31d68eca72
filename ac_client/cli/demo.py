"""`demo`: GPT-2 under memory budgets, beside what people do today."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ac_client.cli.exit_codes import ERROR
from ac_client.cli.options import Json
from ac_client.cli.output import show_progress
from ac_client.files import write_whole


def demo(
    page: Annotated[
        Path, typer.Option("--page", help="Where to write the HTML page with the memory timelines.")
    ] = Path("demo-report.html"),
    pairs: Annotated[int, typer.Option(min=1, help="Timed pairs of steps in each row.")] = 7,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    as_json: Json = False,
) -> None:
    """Train GPT-2 under memory budgets, beside what people do today. Takes about five minutes.

    Every row of the table is measured in a process of its own. Exit code 1 if a row of ours breaks its
    budget or has other gradients than plain training.
    """
    from ac_client.demo import demo as rows
    from ac_client.demo.page import render_page

    with show_progress() as progress:
        result = rows.run(
            pairs=pairs, on_row=lambda name, i, n: progress.start(f"row {i} of {n}: {name}", i - 1, n)
        )
    write_whole(page, render_page(result))
    if as_json:
        print(json.dumps(result.data() | {"page": str(page)}, indent=1))
    else:
        from rich.console import Console

        from ac_client.demo.table import markdown as as_markdown
        from ac_client.demo.table import render

        if markdown:
            print(as_markdown(result))
        else:
            console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
            console.print(render(result))
            print(f"\nmemory timelines: {page}")
    if result.failed:
        raise typer.Exit(ERROR)
