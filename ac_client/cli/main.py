"""The `autoac` command. docs/cli.md is its page.

Results go to stdout, or with `--json` one JSON object; progress and errors go to stderr. Nothing heavy is
imported before a command needs it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated, NoReturn

import typer

from ac_client.cli import demo
from ac_client.cli import explain_commands as telling
from ac_client.cli import plan_commands as planning
from ac_client.cli import regenerate_command as regenerating
from ac_client.cli.output import ERROR, INTERRUPTED, OK, USAGE, one_line
from autoac.offline.launch import SERVICE

_EXIT_CODES = "Exit codes: 0 fine, 1 error, 2 wrong usage, 130 interrupted."

__all__ = ["ERROR", "INTERRUPTED", "OK", "USAGE", "app", "main"]

app = typer.Typer(
    name="autoac",
    help="Plan which tensors a PyTorch training step saves and which it recomputes, for a memory budget.\n\n"
    + _EXIT_CODES,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(epilog=_EXIT_CODES, invoke_without_command=True)
def _common(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error came from, not just its one line.")
    ] = False,
) -> None:
    _state.traceback = traceback
    if version:
        from importlib.metadata import version as version_of

        print(version_of("autoac"))
        raise typer.Exit(OK)
    if context.invoked_subcommand is None:
        raise typer.BadParameter("missing command", context, param_hint="COMMAND")


for _command in (
    demo.demo,
    planning.profile,
    planning.plan,
    planning.stages,
    telling.explain,
    telling.diff,
    regenerating.validate,
):
    app.command(epilog=_EXIT_CODES)(_command)
app.command("frontier", epilog=_EXIT_CODES)(planning.frontier_command)
app.command(epilog=regenerating.EXIT_CODES)(regenerating.regenerate)


def _service_command(name: str, text: str) -> None:
    """A command of the service, which has its own options: `autoac.api.cli.commands` reads them."""

    @app.command(
        name,
        help=text,
        epilog=_EXIT_CODES,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def run(context: typer.Context) -> None:
        from autoac.api.cli.commands import main as service

        raise typer.Exit(service([name, *context.args]))


for _name, _text in SERVICE.items():
    _service_command(_name, _text)


# --- errors ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _State:
    traceback: bool = False


_state = _State()


def _fail(error: BaseException, text: str, code: int, argv: list[str]) -> NoReturn:
    if _state.traceback:
        import traceback

        traceback.print_exception(error)
    if "--json" in argv:
        print(json.dumps({"error": {"kind": type(error).__name__, "message": text}}))
    print(f"autoac: {text}", file=sys.stderr)
    raise SystemExit(code)


def main(argv: list[str] | None = None) -> None:
    """Run the command line; leaves with its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = app(argv or ["--help"], standalone_mode=False)
    except typer.TyperException as error:  # wrong usage, for the most part
        context: typer.Context | None = getattr(error, "ctx", None)
        where = f" (see {context.command_path} --help)" if context is not None else ""
        _fail(error, " ".join(error.format_message().split()) + where, error.exit_code, argv)
    except (typer.Abort, KeyboardInterrupt) as error:
        _fail(error, "interrupted", INTERRUPTED, argv)
    except BrokenPipeError:
        raise  # autoac.offline.launch says nothing of it
    except Exception as error:  # noqa: BLE001 - the last line of defence: an error is one line, whatever it is
        from autoac.planner import InvalidBudget, InvalidLimit

        usage = isinstance(error, InvalidBudget | InvalidLimit)
        _fail(error, one_line(error), USAGE if usage else ERROR, argv)
    raise SystemExit(code if isinstance(code, int) else OK)


if __name__ == "__main__":
    main()
