"""The command `doctor`: what the service needs, or with `--gpu` one model trained on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ac_client.cli.exit_codes import ERROR
from ac_client.cli.options import Json
from ac_client.cli.output import say, show_progress
from ac_client.files import check_writable, write_whole
from autoac.api.cli import commands as service_commands


def doctor(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Check the current GPU in place of the service; two minutes.")
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", help="With --gpu: the page to write, to attach to an issue.")
    ] = Path("autoac-gpu-report.md"),
    as_json: Json = False,
) -> None:
    """Check what the service needs and print the next step for what is wrong; with --gpu, check the GPU.

    The GPU's page has versions and figures, no names of hosts and no paths. Exit code 1 if something is
    wrong.
    """
    if not gpu:
        service_commands.doctor(as_json)
        return
    from ac_client.doctor.examine_gpu import examine_gpu

    check_writable(out)
    with show_progress("training a model on the GPU, in fp32 and bf16"):
        report = examine_gpu()
    write_whole(out, report.to_markdown() + "\n")
    say(report.to_json() if as_json else f"{report.to_markdown()}\n\npage: {out}")
    if report.wrong:
        raise typer.Exit(ERROR)
