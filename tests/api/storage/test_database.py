"""Test the tables, their migrations, and the clock, on both databases."""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from postgres import Server
from service_app import BOTH, JSON, POSTGRES, URN, Serve
from service_fakes import InProcess, chain_profile, request, save_all
from sqlalchemy import event, insert, inspect, select, text
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import OperationalError
from sqlalchemy.schema import CreateIndex, CreateTable
from starlette.testclient import TestClient
from structlog.testing import capture_logs
from waiting import until

from autoac.api import InvalidSettings, Settings, create_app
from autoac.api.errors import DatabaseNotReady
from autoac.api.solving import job_runner
from autoac.api.storage.database import POSTGRES_WAITS, Database, newest_revision, read_url
from autoac.api.storage.job_runs import JobRuns
from autoac.api.storage.job_store import Job
from autoac.api.storage.tables import keys, metadata
from autoac.planner.formats.profile import Profile


@BOTH
def test_connection_in_use_is_closed_after_the_database(database: Database) -> None:
    with database.read() as connection:
        connection.execute(select(keys))
        driver = connection.connection.dbapi_connection
        database.close()
    with pytest.raises((psycopg.OperationalError, sqlite3.ProgrammingError), match="closed"):
        driver.execute("SELECT 1")
    assert database.clock() > 0  # opens another


@BOTH
def test_migrations_create_the_tables_of_the_code(database: Database) -> None:
    """Compare as `alembic check` does."""

    def ours(thing: object, name: str | None, kind: str, reflected: bool, other: object) -> bool:
        return kind != "table" or name in metadata.tables

    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"include_object": ours, "compare_type": True})
        assert compare_metadata(context, metadata) == []
        assert set(metadata.tables) <= set(inspect(connection).get_table_names())


def test_first_migration_is_named_by_the_tables_of_the_code() -> None:
    """A database with other tables is refused: the first migration creates those of the code."""
    statements = [
        str(CreateTable(table).compile(dialect=sqlite.dialect())) for table in metadata.sorted_tables
    ]
    indexes = sorted(str(CreateIndex(i)) for table in metadata.sorted_tables for i in table.indexes)
    digest = hashlib.sha256("\n".join([*statements, *indexes]).encode()).hexdigest()
    assert digest[:16] == newest_revision()


@BOTH
def test_upgrading_again_changes_nothing(database: Database) -> None:
    assert database.revision() == newest_revision()
    database.upgrade()
    database.check()


@BOTH
def test_database_clock_agrees_with_this_machine(database: Database) -> None:
    assert abs(database.clock() - time.time()) < 2


@BOTH
def test_failed_write_leaves_nothing(database: Database) -> None:
    def fails() -> None:
        with database.write() as connection:
            connection.execute(insert(keys).values(id="k", name="n", digest="d", scope="read", created_at=0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with database.read() as connection:
        assert connection.execute(select(keys)).all() == []


def test_embedded_database_is_in_wal_mode_and_enforces_its_keys(database: Database) -> None:
    with database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1


@pytest.mark.parametrize(
    "url", ["nonsense", "mysql://host/name", "sqlite://", "sqlite:///:memory:", "oracle://u:secret@h/n"]
)
def test_unsupported_database_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(InvalidSettings, match="AUTOAC_DATABASE_URL") as caught:
        read_url(url)
    assert "secret" not in str(caught.value)


def test_postgresql_is_reached_with_psycopg() -> None:
    for name in ("postgresql", "postgres", "postgresql+psycopg2"):
        assert read_url(f"{name}://u@h/n").drivername == "postgresql+psycopg"


@POSTGRES
def test_connections_notice_a_server_that_vanished(database: Database) -> None:
    """A server that loses power closes no connection; only the parameters of libpq end them in time."""
    with database.read() as connection:
        parameters = connection.connection.driver_connection.info.get_parameters()
    assert POSTGRES_WAITS.items() <= parameters.items()
    own = read_url("postgresql://u@h/n?connect_timeout=3").query
    assert (own["connect_timeout"], own["tcp_user_timeout"]) == ("3", POSTGRES_WAITS["tcp_user_timeout"])


# --- a database that fails ------------------------------------------------------------------------------


def answer(http: TestClient, path: str) -> tuple[int, Any]:
    """Return the status of an answer, and its `status` member or the type of its problem."""
    response = http.get(path)
    return response.status_code, response.json().get("type", response.json().get("status"))


def test_service_started_before_its_tables_works_once_they_exist(postgres: Server, profile: Profile) -> None:
    name = f"empty_{secrets.token_hex(6)}"
    settings = Settings(database_url=postgres.database(name), runner="embedded")
    app = create_app(settings, InProcess(save_all))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as http:
        assert answer(http, "/v1/policies") == (503, URN + "database-not-ready")
        assert answer(http, "/readyz") == (503, "not ready")
        with Database(settings.url) as database:
            database.upgrade()
        until(lambda: answer(http, "/readyz") == (200, "ready"))
        made = http.post("/v1/policies", content=request(profile), headers=JSON | {"Prefer": "wait=60"})
        assert made.status_code == 201
    postgres.drop(name)


def test_damaged_database_is_503_and_does_not_end_the_runner(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = threading.Event()
    errors: list[Exception] = []
    claim_next = JobRuns.claim_next

    def claim(runs: JobRuns) -> Job | None:
        try:
            return claim_next(runs)
        except Exception as error:
            errors.append(error)
            raise
        finally:
            claimed.set()

    monkeypatch.setattr(JobRuns, "claim_next", claim)
    monkeypatch.setattr(job_runner, "AGAIN_S", 0.01)
    http = serve()
    assert claimed.wait(60)  # what the runner does first, it has done
    service = http.app.state.service  # type: ignore[attr-defined]
    file = tmp_path / "service.sqlite3"
    pages = file.stat().st_size - 4096
    for log in tmp_path.glob("service.sqlite3-wal"):
        log.write_bytes(b"")
    with file.open("r+b") as stream:  # all but the page with the file's header
        stream.seek(4096)
        stream.write(b"\xa5" * pages)
    http.app.state.service.database._engine.dispose()  # type: ignore[attr-defined]  # drop cached pages
    assert answer(http, "/readyz") == (503, "not ready")
    refused = http.get("/v1/policies")
    assert (refused.status_code, refused.json()["type"]) == (503, URN + "database-away")
    assert int(refused.headers["retry-after"]) > 0
    service.worker.wake()
    until(lambda: len(errors) > 1)  # so the runner went on after the first
    assert not service.worker_failed
    assert answer(http, "/livez") == (200, "alive")


def test_runner_ended_by_a_bug_is_reported_by_livez(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claim(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(JobRuns, "claim_next", claim)
    ended = threading.Event()
    settings = Settings(database_url=database_url, runner="embedded")
    app = create_app(settings, InProcess(save_all), on_worker_failure=ended.set)
    with TestClient(app, base_url="http://localhost") as http:
        assert ended.wait(60)
        assert answer(http, "/livez") == (503, "runner ended")


def test_full_disk_is_logged_and_found_by_a_trial_write(database_url: str, profile: Profile) -> None:
    database = Database(database_url)

    @event.listens_for(database._engine, "connect")
    def no_room(connection: Any, record: Any) -> None:
        connection.execute("PRAGMA max_page_count = 1")  # SQLite takes as many as there are

    with pytest.raises(OperationalError, match="full"):
        database.try_write()
    app = create_app(Settings(database_url=database_url, runner="embedded"), InProcess(save_all), database)
    large = chain_profile(*range(1, 20_000), model="Large")
    with TestClient(app, base_url="http://localhost") as http, capture_logs() as lines:
        content = large.to_json().encode()
        assert http.post("/v1/profiles", content=content, headers=JSON).status_code == 503
    assert "database or disk is full" in [line["cause"] for line in lines if line["event"] == "no answer"]


def test_disk_without_room_is_not_ready(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    http = serve()
    until(lambda: answer(http, "/readyz") == (200, "ready"))
    monkeypatch.setattr("autoac.api.storage.database.ROOM", 1 << 60)
    assert http.get("/readyz").json()["database"] == "failed"


@BOTH
@pytest.mark.parametrize(
    ("revision", "words"),
    [
        ("0099", "which another release made.*install that release"),
        ("0000", "which another release made.*start with an empty database"),
    ],
)
def test_database_with_unknown_tables_is_refused(database: Database, revision: str, words: str) -> None:
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :it"), {"it": revision})
    for look in (database.check, database.upgrade):
        with pytest.raises(DatabaseNotReady, match=f"{revision}, {words}"):
            look()


def test_new_database_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    with Database(f"sqlite:///{tmp_path / 'data' / 'new.sqlite3'}") as database:
        database.upgrade()
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "data").iterdir()}
    assert modes["new.sqlite3"] == 0o600
    assert set(modes.values()) == {0o600}
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
