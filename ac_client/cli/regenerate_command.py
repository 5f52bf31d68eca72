"""The command `regenerate`. docs/regenerate.md describes it."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ac_client.cli.exit_codes import DRIFT, ERROR
from ac_client.cli.output import say, show_progress


class OutputFormat(StrEnum):
    """Choose how the outcome is printed."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"


def regenerate(
    config: Annotated[
        Path, typer.Option(metavar="FILE", help="The file that lists the models; see docs/regenerate.md.")
    ] = Path("autoac.toml"),
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with 2 if a policy is out of date.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this model of the file. May be given several times."),
    ] = None,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Remove policies of models and budgets that the file no longer lists."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Plan also models that did not change.")] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure models of the local device again, and judge their policies by it."
        ),
    ] = False,
    output_format: Annotated[
        OutputFormat,
        typer.Option(help="text; json: one object; github: annotations, and the text as the job's summary."),
    ] = OutputFormat.TEXT,
) -> None:
    """Keep the policies of autoac.toml up to date.

    Plans the models that changed and writes their policies, or only checks the policies.
    """
    from ac_client.errors import CommandError
    from ac_client.regenerate import outcome_formats as formats
    from ac_client.regenerate.config import InvalidConfig, read
    from ac_client.regenerate.drift import RunOptions
    from ac_client.regenerate.drift import regenerate as run
    from autoac.profiler import DATASHEETS

    try:
        listed = read(config, tuple(DATASHEETS))
    except FileNotFoundError:
        raise CommandError(
            f"{config}: no such file; write one (docs/regenerate.md has an example), or pass --config"
        ) from None
    except InvalidConfig as error:
        if output_format == "github":
            say(formats.annotation("error", error.file, "invalid settings", error.problem))
        raise
    for name in only or []:
        if name not in listed.models:
            raise typer.BadParameter(
                f"must be one of {', '.join(listed.models)}, got {name!r}", param_hint="--only"
            )
    options = RunOptions(tuple(only or ()), check=check, force=force, prune=prune, measure=measure)
    with show_progress() as progress:
        outcome = run(
            listed,
            config,
            options,
            on_task=lambda task: progress.start(task, 0, 0),
            progress=progress.solving,
        )
    match output_format:
        case "json":
            print(json.dumps(formats.as_data(outcome), indent=1))
        case "github":
            say(formats.as_annotations(outcome))
            _append_to("GITHUB_STEP_SUMMARY", f"```text\n{formats.as_text(outcome)}\n```")
            _append_to("GITHUB_OUTPUT", f"drifted={str(outcome.out_of_date).lower()}")
        case "text":
            say(formats.as_text(outcome))
    if outcome.failed:
        raise typer.Exit(ERROR)
    if outcome.drifted:
        raise typer.Exit(DRIFT)


def _append_to(variable: str, text: str) -> None:
    """Append `text` to the file that a job of GitHub names in an environment variable."""
    if path := os.environ.get(variable):
        with open(path, "a", encoding="utf-8") as file:
            file.write(text + "\n")
