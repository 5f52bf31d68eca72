"""The command `demo`: a small GPT-2 trained in four ways, in a minute."""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ac_client.cli.exit_codes import ERROR
from ac_client.cli.options import Json
from ac_client.cli.output import show_progress
from ac_client.files import check_writable, write_whole


def demo(
    page: Annotated[
        Path, typer.Option("--page", help="Where to write the HTML page with the memory timelines.")
    ] = Path("demo-report.html"),
    turns: Annotated[
        int, typer.Option(min=1, help="Timed steps of each row, in turn; fewer if they take too long.")
    ] = 100,
    as_json: Json = False,
) -> None:
    """Compare four ways to train a small GPT-2.

    The rows show peak and step time of plain training, of torch's checkpoint around every block, and of
    autoac with two budgets: the checkpoint's peak, and the middle between it and plain's. Each has a process
    of its own, and they take steps in turn, for at most a minute. Exit code 1 if autoac exceeds a budget or
    changes gradients.
    """
    from ac_client.errors import CommandError

    if find_spec("transformers") is None:
        raise CommandError("the demo needs transformers; run `pip install 'autoac[demo]'`")
    check_writable(page)
    # Before torch and numpy are loaded: no messages, and one thread. A fork would lose others, and where the
    # machine is busy, they wait for each other and count the wait as CPU time.
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "KINETO_LOG_LEVEL": "6"}
    os.environ.update(quiet | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"})
    importlib.import_module("transformers.models.gpt2.modeling_gpt2")  # once, for all rows
    from ac_client.demo import comparison
    from ac_client.demo.demo_page import render_page

    try:
        with show_progress() as progress:
            result = comparison.run(turns=turns, on_start=progress.start)
    except RuntimeError as error:
        raise CommandError(str(error)) from error
    write_whole(page, render_page(result))
    if as_json:
        print(json.dumps(result.data() | {"page": str(page)}, indent=1))
    else:
        from rich.console import Console

        from ac_client.demo.terminal import render

        console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
        console.print(render(result))
        print(f"\nmemory timelines: {page}")
    if result.failed:
        raise typer.Exit(ERROR)
