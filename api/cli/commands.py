"""The service's commands: `python -m autoac.api COMMAND`, and as `autoac COMMAND` where the client is there.

Results go to stdout, errors to stderr in one line. Exit codes: 0 fine, 1 something is wrong, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NoReturn

from sqlalchemy.exc import DBAPIError

from autoac.api.errors import NotFound
from autoac.api.settings import InvalidSettings, Settings
from autoac.api.solving.child_process import Solver
from autoac.api.storage.database import Database, DatabaseNotReady
from autoac.api.storage.keys import Key, Scope, create_key, list_keys, note, revoke_key

EXIT_CODES = "Exit codes: 0 fine, 1 something is wrong, 2 wrong usage or settings, 130 interrupted."
OPERATOR = "command line"  # as the audit log names it


def main(argv: Sequence[str], solver: Solver | None = None) -> int:
    """Run a command and give its exit code. `solver` is for tests."""
    from autoac.api.cli.server import RefusedToListen

    arguments = _parser().parse_args(argv or ["serve"])
    try:
        return int(arguments.run(arguments, solver))
    except (InvalidSettings, RefusedToListen) as error:
        print(f"autoac: {error}", file=sys.stderr)
        return 2
    except (DatabaseNotReady, NotFound) as error:
        print(f"autoac: {error}", file=sys.stderr)
        return 1
    except DBAPIError as error:
        reason = str(error.orig).partition("\n")[0]
        print(f"autoac: the database: {reason}; `autoac doctor` says more", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"autoac: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text} is no port, which is 0 to 65535")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="autoac",
        description="The planning service. Settings are environment variables: docs/service.md.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(into: Any, name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = into.add_parser(name, help=text, description=text, epilog=EXIT_CODES)
        made.set_defaults(run=run)
        return made

    serve = command(commands, "serve", _serve, "Listen for requests. With SQLite, solve them too.")
    serve.add_argument("--host", help="Address to listen on; a key is needed for other than loopback.")
    serve.add_argument("--port", type=_port, help="Port to listen on; 0 is any that is free.")
    command(commands, "worker", _worker, "Solve jobs from PostgreSQL, until told to stop.")

    db = commands.add_parser("db", help="Bring the database up to date, or take away what is old.")
    of_db = db.add_subparsers(required=True, metavar="COMMAND")
    command(of_db, "upgrade", _upgrade, "Bring the tables to this release. Safe to run again.")
    prune = command(of_db, "prune", _prune, "Forget what AUTOAC_KEEP_... say; never what an alias names.")
    prune.add_argument("--dry-run", action="store_true", help="Only say what would go.")

    keys = commands.add_parser("keys", help="Make, list and revoke keys.")
    of_keys = keys.add_subparsers(required=True, metavar="COMMAND")
    create = command(of_keys, "create", _create_key, "Make a key and print it; it is not shown again.")
    create.add_argument("name", help="What it is for.")
    create.add_argument("--scope", choices=[scope.word for scope in Scope], default=Scope.PLAN.word)
    listed = command(of_keys, "list", _list_keys, "The keys, without their secrets.")
    revoke = command(of_keys, "revoke", _revoke_key, "From now on a key is none, at the latest in 5 s.")
    revoke.add_argument("id", help="As `autoac keys list` names it.")

    doctor = command(commands, "doctor", _doctor, "Look at settings, database and solver; 1 if one is wrong.")
    for one in (prune, create, listed, revoke, doctor):
        one.add_argument("--json", action="store_true", help="Print JSON on stdout.")
    return parser


def _serve(arguments: argparse.Namespace, solver: Solver | None) -> int:
    from autoac.api.cli.server import serve

    try:
        serve(host=arguments.host, port=arguments.port, solver=solver)
    except SystemExit as left:  # uvicorn leaves so when it cannot listen, and has said why
        return 1 if left.code else 0
    return 0


def _worker(arguments: argparse.Namespace, solver: Solver | None) -> int:
    from autoac.api.telemetry.logs import configure

    settings = Settings.load()
    if settings.url.startswith("sqlite"):
        raise InvalidSettings(
            "AUTOAC_DATABASE_URL: workers need PostgreSQL; with SQLite `autoac serve` solves by itself"
        )
    try:
        from autoac.api.solving.worker import Worker
    except ModuleNotFoundError as error:
        raise InvalidSettings(f"workers need {error.name}; install autoac[postgres]") from None
    configure()
    Worker(settings, solver).run()
    return 0


def _upgrade(arguments: argparse.Namespace, solver: Solver | None) -> int:
    with Database(Settings.load().url) as database:
        before = _revision(database)
        database.upgrade()
        after = database.revision()
    print(f"at migration {after}" + (" already" if before == after else f", from {before or 'none'}"))
    return 0


def _revision(database: Database) -> str | None:
    from pathlib import Path

    if database.is_sqlite and not Path(database.url.database or "").exists():
        return None
    return database.revision()


def _prune(arguments: argparse.Namespace, solver: Solver | None) -> int:
    from sqlalchemy import delete

    from autoac.api.storage.database import now
    from autoac.api.storage.job_store import Jobs
    from autoac.api.storage.registry import prunable, prune
    from autoac.api.storage.tables import audit

    settings = Settings.load()
    with _opened(settings) as database:
        if arguments.dry_run:
            with database.read() as connection:
                found = prunable(connection, settings)
            forgotten: dict[str, int] = {}
        else:
            ended = Jobs(database, settings).prune(settings.keep_jobs_days)
            with database.write() as connection:
                found = prune(connection, settings)
                old = audit.c.at < now() - settings.keep_audit_days * 86_400
                forgotten = {
                    "jobs": ended,
                    "audit lines": connection.execute(delete(audit).where(old)).rowcount,
                }
                subject = f"{len(found.policies)} policies, {len(found.profiles)} profiles, {ended} jobs"
                note(connection, OPERATOR, "prune", subject)
    counts = {"policies": len(found.policies), "profiles": len(found.profiles)} | forgotten
    if arguments.json:
        print(json.dumps(counts | {"dry_run": arguments.dry_run, "policy_ids": list(found.policies)}))
    else:
        verb = "would forget" if arguments.dry_run else "forgot"
        print(f"{verb} " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    return 0


def _create_key(arguments: argparse.Namespace, solver: Solver | None) -> int:
    with _opened(Settings.load()) as database, database.write() as connection:
        key, secret = create_key(connection, arguments.name, Scope[arguments.scope.upper()])
        note(connection, OPERATOR, "create key", f"{key.id} ({key.scope.word}) {key.name}")
    if arguments.json:
        print(json.dumps(_told(key) | {"key": secret}))
    else:
        print(secret)
        print(f"key {key.id}, scope {key.scope.word}; it is not shown again", file=sys.stderr)
    return 0


def _list_keys(arguments: argparse.Namespace, solver: Solver | None) -> int:
    with _opened(Settings.load()) as database, database.read() as connection:
        found = list_keys(connection)
    if arguments.json:
        print(json.dumps([_told(key) for key in found]))
        return 0
    for key in found:
        made = _day(key.created_at)
        gone = "" if key.revoked_at is None else f"  revoked {_day(key.revoked_at)}"
        print(f"{key.id}  {key.scope.word:<5}  {made}  {key.name}{gone}")
    return 0


def _revoke_key(arguments: argparse.Namespace, solver: Solver | None) -> int:
    with _opened(Settings.load()) as database, database.write() as connection:
        key = revoke_key(connection, arguments.id)
        note(connection, OPERATOR, "revoke key", f"{key.id} {key.name}")
    print(json.dumps(_told(key)) if arguments.json else f"key {key.id} is revoked")
    return 0


def _doctor(arguments: argparse.Namespace, solver: Solver | None) -> int:
    from autoac.api.cli.doctor import examine

    found = list(examine())
    if arguments.json:
        lines = [{"what": f.what, "ok": f.ok, "said": f.said, "move": f.move} for f in found]
        print(json.dumps(lines, indent=1))
    else:
        for finding in found:
            print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.what:<10}  {finding.said}")
            if finding.move:
                print(f"{'':18}{finding.move}")
    return 0 if all(finding.ok for finding in found) else 1


@contextmanager
def _opened(settings: Settings) -> Iterator[Database]:
    """The database, ready: a SQLite file is made where there is none, as `autoac serve` would."""
    with Database(settings.url) as database:
        if database.is_sqlite:
            database.upgrade()
        else:
            database.check()
        yield database


def _told(key: Key) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "scope": key.scope.word,
        "created_at": _day(key.created_at),
        "revoked_at": None if key.revoked_at is None else _day(key.revoked_at),
    }


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
