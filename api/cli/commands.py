"""The service's commands, as the typer app `app`: `python -m autoac.api COMMAND` and `autoac COMMAND`.

Results go to stdout, errors to stderr in one line. Importing this module costs neither torch nor SQLAlchemy:
each command imports what it needs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

if TYPE_CHECKING:
    from sqlalchemy import Row

    from autoac.api.settings import Settings
    from autoac.api.solving.child_process import Solver
    from autoac.api.storage.database import Database

OK, ERROR, USAGE, INTERRUPTED = 0, 1, 2, 130
EXIT_CODES = "Exit codes: 0 fine, 1 error, 2 wrong usage or settings, 130 interrupted."

SERVICE_PACKAGES = frozenset(
    (
        *("alembic", "anyio", "cachetools", "fastapi", "filelock", "jinja2", "prometheus_client"),
        *("pydantic_settings", "sqlalchemy", "starlette", "structlog", "uvicorn"),
    )
)
"""Packages that the extra `service` installs. The client runs without them."""

_STYLE: dict[str, Any] = {
    "no_args_is_help": False,
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}
app = typer.Typer(
    name="autoac",
    help="Run the planning service. Its settings are environment variables (docs/service.md).",
    **_STYLE,
)
db = typer.Typer(help="Upgrade the service's database, or delete old rows.", **_STYLE)
keys = typer.Typer(help="Create, list and revoke the service's keys.", **_STYLE)
app.add_typer(db, name="db")
app.add_typer(keys, name="keys")

MOST_OF_A_NAME = 100  # characters, of a key

WrongUsage: Any = typer.BadParameter.__base__  # of typer, or of click under an older typer


class KeyScope(StrEnum):
    """Name what a key allows; each includes the one before."""

    READ = "read"
    PLAN = "plan"
    ADMIN = "admin"


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


def main(argv: Sequence[str] | None = None, solver: Solver | None = None) -> int:
    """Run a command, `serve` by default, and return its exit code. Tests pass a `solver`."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = app(list(argv) or ["serve"], prog_name="autoac", obj=solver, standalone_mode=False)
    except WrongUsage as error:
        context: typer.Context | None = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        _say(f"autoac: {' '.join(error.format_message().split())}{hint}", file=sys.stderr)
        return int(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if (text := missing_package(error)) is None:
            raise
        _say(f"autoac: {text}", file=sys.stderr)
        return ERROR
    return code if isinstance(code, int) else OK


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Return what to say if a package of the service is not installed; None for other modules."""
    name = (error.name or "").partition(".")[0]
    if name not in SERVICE_PACKAGES:
        return None
    return f"the planning service needs {name}; install autoac with its extra `service`"


def _say(text: str, file: TextIO | None = None) -> None:
    """Print `text`, which may have names from the database; on stdout by default."""
    from autoac.planner.units import printable

    print(printable(text), file=file)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Print an expected error as one line on stderr and exit with its code."""
    from sqlalchemy.exc import DBAPIError

    from autoac.api.errors import ServiceError
    from autoac.api.settings import InvalidSettings
    from autoac.api.storage.database import cause_of

    try:
        yield
    except InvalidSettings as error:
        text, code = str(error), USAGE
    except ServiceError as error:
        text, code = str(error), ERROR
    except DBAPIError as error:
        text, code = f"the database: {cause_of(error)}; `autoac doctor` says more", ERROR
    else:
        return
    _say(f"autoac: {text}", file=sys.stderr)
    raise typer.Exit(code)


@app.command(epilog=EXIT_CODES)
def serve(
    context: typer.Context,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; any other than loopback needs a key.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65_535, help="Port to listen on; 0 picks a free one.")
    ] = None,
) -> None:
    """Listen for requests. With SQLite, solve them too."""
    with _one_line_errors():
        from autoac.api.cli.server import serve

        try:
            serve(host=host, port=port, solver=context.obj)
        except SystemExit as stopped:  # uvicorn cannot listen, and has logged the reason
            raise typer.Exit(ERROR if stopped.code else OK) from None


@app.command(epilog=EXIT_CODES)
def worker(context: typer.Context) -> None:
    """Solve jobs from PostgreSQL until stopped, on as many machines as you like."""
    with _one_line_errors():
        from autoac.api.settings import InvalidSettings, Settings
        from autoac.api.telemetry.logs import configure

        settings = Settings.load()
        try:
            from autoac.api.solving.worker import run_worker
        except ModuleNotFoundError as error:
            raise InvalidSettings(
                f"workers need {error.name}; install autoac with its extra `postgres`"
            ) from None
        configure()
        run_worker(settings, context.obj)


@db.command(epilog=EXIT_CODES)
def upgrade() -> None:
    """Bring the tables to this release. Safe to run again."""
    from autoac.api.settings import Settings
    from autoac.api.storage.database import Database

    with _one_line_errors(), Database(Settings.load().url) as database:
        before = database.revision() if database.exists() else None
        database.upgrade()
        after = database.revision()
    print(f"at migration {after}" + (" already" if before == after else f", from {before or 'none'}"))


@db.command(epilog=EXIT_CODES)
def prune(
    days: Annotated[
        float, typer.Option(min=0.01, max=100_000, help="Delete what is older than so many days.")
    ],
) -> None:
    """Delete old policies, finished jobs, and profiles that neither needs."""
    from autoac.api.settings import Settings
    from autoac.api.storage.job_store import prune as prune_database

    with _one_line_errors(), _ready_database(Settings.load()) as database, database.write() as connection:
        deleted = prune_database(connection, days)
    print("deleted " + ", ".join(f"{count} {name}" for name, count in deleted.items()))


@keys.command(epilog=EXIT_CODES)
def create(
    name: Annotated[str, typer.Argument(help="Who uses the key; pages and jobs show it.")],
    scope: Annotated[
        KeyScope,
        typer.Option(help="What the key allows; each includes the one before."),
    ] = KeyScope.PLAN,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it. It is not shown again."""
    from autoac.api.settings import Settings
    from autoac.api.storage.keys import Scope, create_key

    if not name.isprintable() or name != name.strip() or not 1 <= len(name) <= MOST_OF_A_NAME:
        text = f"NAME must be 1 to {MOST_OF_A_NAME} printable characters, without spaces around, got {name!r}"
        raise typer.BadParameter(text)
    with _one_line_errors(), _ready_database(Settings.load()) as database, database.write() as connection:
        key, secret = create_key(connection, name, Scope[scope.upper()])
    if as_json:
        print(json.dumps(_without_secret(key) | {"key": secret}))
    else:
        print(secret)
        print(f"key {key.id}, scope {key.scope}; it is not shown again", file=sys.stderr)


@keys.command("list", epilog=EXIT_CODES)
def list_all(as_json: AsJson = False) -> None:
    """List the keys, without their secrets."""
    from autoac.api.settings import Settings
    from autoac.api.storage.keys import list_keys

    with _one_line_errors(), _ready_database(Settings.load()) as database, database.read() as connection:
        found = list_keys(connection)
    if as_json:
        print(json.dumps([_without_secret(key) for key in found]))
        return
    for key in found:
        revoked = "" if key.revoked_at is None else f"  revoked {_timestamp(key.revoked_at)}"
        _say(f"{key.id}  {key.scope:<5}  {_timestamp(key.created_at)}  {key.name}{revoked}")


@keys.command(epilog=EXIT_CODES)
def revoke(
    id: Annotated[str, typer.Argument(help="Id of the key, from `autoac keys list`.")],
    as_json: AsJson = False,
) -> None:
    """Revoke a key. Every replica refuses it within 5 s."""
    from autoac.api.settings import Settings
    from autoac.api.storage.keys import revoke_key

    with _one_line_errors(), _ready_database(Settings.load()) as database, database.write() as connection:
        key = revoke_key(connection, id)
    print(json.dumps(_without_secret(key)) if as_json else f"key {key.id} is revoked")


@app.command(epilog=EXIT_CODES)
def doctor(as_json: AsJson = False) -> None:
    """Check settings, database and solver, and print the next step for what is wrong."""
    from autoac.api.cli.doctor import examine

    found = list(examine())
    if as_json:
        lines = [{"what": f.what, "ok": f.ok, "said": f.said, "move": f.move} for f in found]
        print(json.dumps(lines, indent=1))
    else:
        for finding in found:
            _say(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.what:<10}  {finding.said}")
            if finding.move:
                _say(f"{'':18}{finding.move}")
    if not all(finding.ok for finding in found):
        raise typer.Exit(ERROR)


@contextmanager
def _ready_database(settings: Settings) -> Iterator[Database]:
    """Open the database. Create or upgrade SQLite's file first, as `autoac serve` would."""
    from autoac.api.storage.database import Database

    with Database(settings.url) as database:
        if database.is_sqlite:
            database.upgrade()
        else:
            database.check()
        yield database


def _without_secret(key: Row[Any]) -> dict[str, Any]:
    revoked_at = None if key.revoked_at is None else _timestamp(key.revoked_at)
    return key._asdict() | {"created_at": _timestamp(key.created_at), "revoked_at": revoked_at}


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
