"""Check everything that the service needs, for `autoac doctor`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio
from sqlalchemy.exc import SQLAlchemyError

from autoac.api.errors import DatabaseNotReady
from autoac.api.settings import InvalidSettings, Settings
from autoac.api.solving.child_process import SpawnedSolver
from autoac.api.storage import queue_of
from autoac.api.storage.database import Database, DatabaseReadOnly, cause_of
from autoac.api.storage.keys import any_key

CHILD_S = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    what: str
    ok: bool
    said: str
    move: str = ""  # the next step; empty if all is well


def examine(environment: Callable[[], Settings] = Settings.load) -> Iterator[Finding]:
    """Check settings, database, migrations, writes, keys, runners and solver.

    A failed check skips those that depend on it.
    """
    try:
        settings = environment()
        database = Database(settings.url)
    except InvalidSettings as error:
        yield Finding("settings", False, str(error), "correct the variable; docs/service.md lists them all")
        return
    size = "SQLite, embedded runner" if database.is_sqlite else "PostgreSQL"
    yield Finding("settings", True, f"{size}, listening on {settings.host}:{settings.port}")
    with database:
        yield from _database(settings, database)
    yield _solver(settings)


def _database(settings: Settings, database: Database) -> Iterator[Finding]:
    shown = database.url.render_as_string(hide_password=True)
    if database.is_sqlite:
        file = Path(database.url.database or "")
        if not file.exists():
            folder = next(p for p in file.parents if p.exists())
            ok = os.access(folder, os.W_OK)
            move = "" if ok else f"make {folder} writable, or set AUTOAC_DATABASE_URL"
            said = (
                f"{file} is not there yet; `autoac serve` makes it" if ok else f"{folder} cannot be written"
            )
            yield Finding("database", ok, said, move)
            return
    try:
        database.clock()
    except SQLAlchemyError as error:
        move = "start it, or correct AUTOAC_DATABASE_URL"
        if database.is_sqlite:
            move = "restore a backup of the file, or move it away: `autoac serve` makes an empty one"
        yield Finding("database", False, f"{shown}: {cause_of(error)}", move)
        return
    yield Finding("database", True, f"{shown} answers")
    try:
        database.check()
    except DatabaseNotReady as error:
        yield Finding("migrations", False, error.reason, error.move)
        return
    yield Finding("migrations", True, f"at {database.revision()}, the newest")
    yield _write(database)
    with database.read() as connection:
        has_keys = any_key(connection)
    safe = has_keys or settings.token is not None or settings.on_loopback
    yield Finding(
        "keys",
        safe,
        "there are keys" if has_keys else "a token" if settings.token else "none; loopback needs none",
        "" if safe else "run `autoac keys create NAME --scope admin`, or set AUTOAC_TOKEN",
    )
    with database.read() as connection:
        count = queue_of(database).worker_count(connection, settings.lease_s)
    if settings.runs_embedded:
        yield Finding("runners", True, "`autoac serve` runs jobs by itself")
    elif count:
        yield Finding("runners", True, f"{count} workers have a recent heartbeat")
    else:
        yield Finding("runners", False, "no worker has a recent heartbeat", "start `autoac worker`")


def _write(database: Database) -> Finding:
    """Check that the database takes writes, also of the size of a profile."""
    try:
        database.check_writable()
        database.try_write()
    except (DatabaseReadOnly, SQLAlchemyError) as error:
        move = (
            "make room on the disk, or make the file and its folder writable"
            if database.is_sqlite
            else "AUTOAC_DATABASE_URL must lead to the primary; make room on its disk"
        )
        return Finding("writes", False, cause_of(error), move)
    return Finding("writes", True, "a row of 1 MiB was written and deleted")


def _solver(settings: Settings) -> Finding:
    """Check that a child process starts, within its memory, and reads a body."""
    from autoac.api.errors import MalformedRequest, ServiceError
    from autoac.api.requests import Kind

    solver = SpawnedSolver(settings.solve_time_limit_s, CHILD_S, settings.solve_memory_bytes)
    try:
        anyio.run(solver.parse_request, Kind.POLICY, b"{}")
    except MalformedRequest:
        return Finding("solver", True, "a child starts and answers")
    except ServiceError as error:
        return Finding(
            "solver", False, str(error), "raise AUTOAC_SOLVE_MEMORY_BYTES; the lines above say more"
        )
    raise AssertionError("an empty request was accepted")
