"""`autoac doctor`: looks at everything that the service needs, and says the next move for what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio
from sqlalchemy.exc import SQLAlchemyError

from autoac.api.database import Database, DatabaseNotReady
from autoac.api.keys import any_key
from autoac.api.runner import alive
from autoac.api.settings import InvalidSettings, Settings
from autoac.api.solver import SpawnedSolver

CHILD_S = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    ok: bool
    said: str
    move: str = ""  # what to do next; empty where all is well


def examine(environment: Callable[[], Settings] = Settings.load) -> Iterator[Finding]:
    """Settings, database, migrations, keys, runners, solver; stops at what the rest rests on."""
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
        reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
        yield Finding("database", False, f"{shown}: {reason}", "start it, or correct AUTOAC_DATABASE_URL")
        return
    yield Finding("database", True, f"{shown} answers")
    try:
        database.check()
    except DatabaseNotReady as error:
        yield Finding("migrations", False, str(error), "run `autoac db upgrade`")
        return
    yield Finding("migrations", True, f"at {database.revision()}, the newest")
    with database.read() as connection:
        has_keys = any_key(connection)
    safe = has_keys or settings.token is not None or settings.on_loopback
    yield Finding(
        "keys",
        safe,
        "there are keys" if has_keys else "a token" if settings.token else "none; loopback needs none",
        "" if safe else "run `autoac keys create NAME --scope admin`, or set AUTOAC_TOKEN",
    )
    count = alive(database, settings.lease_s)
    if count or settings.runs_embedded:
        yield Finding("runners", True, f"{count} were heard of lately")
    else:
        yield Finding("runners", False, "nobody solves", "start `autoac worker`")


def _solver(settings: Settings) -> Finding:
    """That a child starts, within its memory, and reads a body."""
    from autoac.api.errors import MalformedRequest, ServiceError
    from autoac.api.request import Kind

    solver = SpawnedSolver(settings.solve_time_limit_s, CHILD_S, settings.solve_memory_bytes)
    try:
        anyio.run(solver.take, Kind.POLICY, b"{}")
    except MalformedRequest:
        return Finding("solver", True, "a child starts and answers")
    except ServiceError as error:
        return Finding(
            "solver", False, str(error), "raise AUTOAC_SOLVE_MEMORY_BYTES; the lines above say more"
        )
    raise AssertionError("an empty request was taken")
