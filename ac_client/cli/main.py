"""The `autoac` command. docs/cli.md is its page.

Results go to stdout, or with `--json` one JSON object; progress and errors go to stderr. Importing this
module loads neither torch nor the planner nor a database: each command imports what it needs when it runs.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, NoReturn

import typer

from ac_client.cli import (
    demo,
    doctor_command,
    explain_commands,
    fit_command,
    plan_commands,
    regenerate_command,
)
from ac_client.cli.exit_codes import EPILOG, ERROR, OK, exit_code_of
from autoac.api.cli.commands import app as service_app

app = typer.Typer(
    name="autoac",
    help="Plan which tensors a PyTorch training step saves and which it recomputes, for a memory budget.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(epilog=EPILOG, invoke_without_command=True)
def _common(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Print the traceback of an error in addition to its message.")
    ] = False,  # `_fail` looks for it, as for --json
) -> None:
    if version:
        from importlib.metadata import version as version_of

        print(version_of("autoac"))
        raise typer.Exit(OK)
    if context.invoked_subcommand is None:
        raise typer.BadParameter("missing command", context, param_hint="COMMAND")


for _command in (
    demo.demo,
    plan_commands.profile,
    plan_commands.plan,
    explain_commands.explain,
    explain_commands.diff,
    regenerate_command.regenerate,
    doctor_command.doctor,
):
    app.command(epilog=EPILOG)(_command)
app.command("frontier", epilog=EPILOG)(plan_commands.frontier_command)
app.command("fit", epilog=EPILOG)(fit_command.fit_command)


own = {command.callback.__name__ for command in app.registered_commands if command.callback is not None}
app.registered_commands += [
    command
    for command in service_app.registered_commands  # serve, worker
    if command.callback is not None and command.callback.__name__ not in own
]
app.registered_groups += service_app.registered_groups  # db, keys


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with its code; exit without a message if stdout was closed (`| head`)."""
    try:
        try:
            _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it ends; send the rest to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(ERROR) from None


def _run(argv: list[str]) -> NoReturn:
    try:
        code = app(argv or ["--help"], standalone_mode=False)
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every error becomes one line and a code
        _fail(error, argv)
    raise SystemExit(code if isinstance(code, int) else OK)


def _fail(error: BaseException, argv: list[str]) -> NoReturn:
    """Print `error` in one line, and as JSON if `--json` asks for it; exit with its code."""
    from ac_client.cli.output import one_line

    if "--traceback" in argv:
        import traceback

        traceback.print_exception(error)
    text = one_line(error)
    if "--json" in argv:
        print(json.dumps({"error": {"kind": type(error).__name__, "message": text}}))
    print(f"autoac: {text}", file=sys.stderr)
    raise SystemExit(exit_code_of(error))


if __name__ == "__main__":
    main()
