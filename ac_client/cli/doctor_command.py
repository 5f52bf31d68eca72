"""The command `doctor`: what the service needs, or with `--gpu` what only a GPU can settle."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ac_client.cli.exit_codes import ERROR
from ac_client.cli.options import Json
from ac_client.cli.output import say, show_progress
from ac_client.files import check_writable
from autoac.api.cli import commands as service_commands


class ModelSize(StrEnum):
    """Choose how large the models are that the doctor runs."""

    FULL = "full"
    TINY = "tiny"


def doctor(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Check the current GPU in place of the service; takes minutes.")
    ] = False,
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="With --gpu: the report, as Markdown; JSON goes to the same name with .json."
        ),
    ] = Path("autoac-gpu-report.md"),
    size: Annotated[
        ModelSize,
        typer.Option(help="With --gpu: models of a few GB, or tiny ones that take seconds."),
    ] = ModelSize.FULL,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PATTERN",
            help="With --gpu: the checks to run, such as '*bf16' or 'attention'; may be given several times.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check what the service needs and print the next step for what is wrong; with --gpu, check the GPU.

    The GPU's report has versions and figures, no names of hosts and no paths. Exit code 1 if something is
    wrong.
    """
    if not gpu:
        service_commands.doctor(as_json)
        return
    from ac_client.doctor.examine_gpu import examine_gpu

    check_writable(out)
    with show_progress() as progress:
        report = examine_gpu(
            size,
            lambda name, i, n: progress.start(f"check {i + 1} of {n}: {name}", i, n),
            out,
            only or (),
        )
    say((report.to_json() if as_json else report.to_markdown()).removesuffix("\n"))
    if not as_json:
        print(f"\nreport: {out} and {out.with_suffix('.json')}")
    if report.failed:
        raise typer.Exit(ERROR)
