"""The command `demo`: two small models trained in three ways, in a minute."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ac_client.cli.exit_codes import ERROR
from ac_client.cli.output import show_progress
from ac_client.files import check_writable, write_whole


def demo(
    page: Annotated[
        Path, typer.Option("--page", help="Where to write the HTML page with the memory timelines.")
    ] = Path("demo-report.html"),
) -> None:
    """Compare three ways to train a small GPT-2 and a small U-Net.

    The rows show peak and step time of plain training, of torch's checkpoint around every block, and of
    autoac with the checkpoint's peak as its budget. Each has a process of its own, and they take steps in
    turn, for at most a minute. Then: the largest batch of each way in the same memory. Exit code 1 if autoac
    exceeds a budget or changes gradients.
    """
    from ac_client.errors import CommandError

    if find_spec("transformers") is None:
        raise CommandError("the demo needs transformers; install autoac with its extra `demo`")
    check_writable(page)
    # Before torch and numpy are loaded: no messages, and one thread. A fork would lose others, and where the
    # machine is busy, they wait for each other and count the wait as CPU time.
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "KINETO_LOG_LEVEL": "6"}
    os.environ.update(quiet | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"})
    importlib.import_module("transformers.models.gpt2.modeling_gpt2")  # once, for all rows
    from rich.console import Console

    from ac_client.demo import comparison
    from ac_client.demo.demo_page import render_page
    from ac_client.demo.terminal import render

    try:
        with show_progress() as progress:
            result = comparison.run(on_start=progress.start)
    except RuntimeError as error:
        raise CommandError(str(error)) from error
    write_whole(page, render_page(result))
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    console.print(render(result))
    print(f"\nmemory timelines: {page}")
    if result.failed:
        raise typer.Exit(ERROR)
