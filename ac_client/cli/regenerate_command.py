"""`autoac regenerate`. docs/regenerate.md is its page."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ac_client.cli.output import CommandError, progress_of

EXIT_CODES = "Exit codes: 0 fine, 1 error, 2 wrong usage or drift found by --check, 130 interrupted."
ERROR, DRIFT = 1, 2


def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Policies, policy sets, locks.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Check policy files offline, without loading torch: what the pre-commit hook runs."""
    from autoac.offline import validate as checking

    raise typer.Exit(checking.run([str(file) for file in files], as_json=as_json))


class OutputFormat(StrEnum):
    """How results are told."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"


def regenerate(
    config: Annotated[
        Path, typer.Option(metavar="FILE", help="Which models have policies; docs/regenerate.md.")
    ] = Path("autoac.toml"),
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit code 2 if a policy is out of date.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A model of the file. May be given several times."),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove policies of what the file lists no longer.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Plan also what did not change.")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure models of the local device again, and judge their policies."),
    ] = False,
    output_format: Annotated[
        OutputFormat,
        typer.Option(help="text; json: one object; github: annotations, and a summary of the job."),
    ] = OutputFormat.TEXT,
) -> None:
    """Plan what changed among the models of autoac.toml and write their policies, or check them."""
    from ac_client.regenerate import output as telling
    from ac_client.regenerate.config import InvalidSettings, read
    from ac_client.regenerate.drift import Wanted
    from ac_client.regenerate.drift import regenerate as run
    from autoac.profiler.timing.roofline import DATASHEETS

    try:
        settings = read(config, tuple(DATASHEETS))
    except FileNotFoundError:
        raise CommandError(
            f"{config}: no such file; write one (docs/regenerate.md has an example), or pass --config"
        ) from None
    except InvalidSettings as error:
        if output_format is OutputFormat.GITHUB:
            print(telling.problems_as_annotations(error))
        raise CommandError(str(error)) from error
    for name in only or []:
        if name not in settings.models:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(settings.models)}", param_hint="--only")
    wanted = Wanted(tuple(only or ()), check=check, force=force, prune=prune, measure=measure)
    with progress_of("") as progress:
        outcome = run(
            settings,
            config,
            wanted,
            telling=lambda what: progress.at(what, 0, 0),
            progress=progress.solving,
        )
    match output_format:
        case OutputFormat.JSON:
            print(json.dumps(telling.as_data(outcome), indent=1))
        case OutputFormat.GITHUB:
            print(telling.as_annotations(outcome))
        case OutputFormat.TEXT:
            print(telling.as_text(outcome))
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if output_format is OutputFormat.GITHUB and summary:
        with open(summary, "a", encoding="utf-8") as file:
            file.write(telling.as_summary(outcome))
    outputs = os.environ.get("GITHUB_OUTPUT")
    if output_format is OutputFormat.GITHUB and outputs:
        with open(outputs, "a", encoding="utf-8") as file:
            file.write(f"drifted={str(outcome.out_of_date).lower()}\n")
    if outcome.failed:
        raise typer.Exit(ERROR)
    if outcome.drifted:
        raise typer.Exit(DRIFT)
