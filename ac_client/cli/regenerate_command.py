"""The command `regenerate`. docs/regenerate.md describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ac_client.cli.exit_codes import ERROR
from ac_client.cli.output import one_line, say, show_progress
from ac_client.files import write_whole


def regenerate(
    config: Annotated[
        Path, typer.Option(metavar="FILE", help="The file that lists the models; see docs/regenerate.md.")
    ] = Path("autoac.toml"),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if a policy is out of date.")
    ] = False,
) -> None:
    """Plan the models of autoac.toml, and write their policies.

    With --check, compares the stored policies with new plans, and says in a line why one is out of date.
    """
    from ac_client.errors import CommandError
    from ac_client.regenerate.config import read_config
    from ac_client.regenerate.new_plans import new_plans, why_out_of_date
    from autoac.planner import Plan
    from autoac.profiler import DATASHEETS

    try:
        listed = read_config(config, tuple(DATASHEETS))
    except FileNotFoundError:
        raise CommandError(
            f"{config}: no such file; write one (docs/regenerate.md has an example), or pass --config"
        ) from None
    folder, n, wrong = config.parent / listed.policies, 0, 0
    if not check:
        folder.mkdir(parents=True, exist_ok=True)
    with show_progress() as progress:
        for name, gap, plan in new_plans(listed, config.parent, progress.start, progress.solving):
            file, why = folder / name, ""
            if not isinstance(plan, Plan):
                why = one_line(plan)
            elif check:
                why = why_out_of_date(file, plan, gap)
            else:
                write_whole(file, plan.policy().to_json())
            if why:
                say(f"{file}: {why}")
            n, wrong = n + 1, wrong + bool(why)
    if not check:
        say(f"{folder}: {n - wrong} of {n} policies written")
    elif wrong:
        say(f"{wrong} of {n} policies are out of date: run `autoac regenerate`, and commit {folder}")
    else:
        say(f"{n} policies are up to date")
    if wrong:
        raise typer.Exit(ERROR)
