"""Exit codes of the `autoac` command: the one table, and the errors that lead to each."""

from __future__ import annotations

OK = 0
ERROR = 1
USAGE = 2  # wrong usage
INTERRUPTED = 130

EPILOG = "Exit codes: 0 success, 1 error, 2 wrong usage, 130 interrupted."


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for an error that ended a command."""
    import typer

    from autoac.api.cli.commands import WrongUsage
    from autoac.planner.errors import InvalidBudget, InvalidLimit

    if isinstance(error, WrongUsage):
        return int(error.exit_code)
    match error:
        case typer.Abort() | KeyboardInterrupt():
            return INTERRUPTED
        case InvalidBudget() | InvalidLimit():
            return USAGE
        case _:
            return ERROR
