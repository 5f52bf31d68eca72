"""The tables, their migrations, and the clock, on both databases."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from conftest import BOTH
from sqlalchemy import insert, inspect, select, text
from sqlalchemy.exc import OperationalError

from autoac.api import InvalidSettings
from autoac.api.database import Database, DatabaseNotReady, newest_revision, read_url
from autoac.api.tables import metadata, runners


@BOTH
def test_migrations_make_the_tables_that_the_code_names(database: Database) -> None:
    """What `alembic check` looks at."""

    def ours(thing: object, name: str | None, kind: str, reflected: bool, other: object) -> bool:
        return kind != "table" or name in metadata.tables

    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"include_object": ours, "compare_type": True})
        assert compare_metadata(context, metadata) == []
        assert set(metadata.tables) <= set(inspect(connection).get_table_names())


@BOTH
def test_upgrading_again_changes_nothing(database: Database) -> None:
    assert database.revision() == newest_revision()
    database.upgrade()
    database.check()


@pytest.mark.parametrize("size", ["postgresql"], indirect=True)
def test_postgresql_has_the_job_queue_too(database: Database) -> None:
    with database.read() as connection:
        assert connection.scalar(text("SELECT count(*) FROM procrastinate_jobs")) == 0


def test_tables_of_another_release_are_said_to_be_so(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'new.sqlite3'}")
    with pytest.raises(DatabaseNotReady, match="autoac db upgrade"):
        database.check()
    database.close()


@BOTH
def test_the_databases_clock_is_the_machines_here(database: Database) -> None:
    assert abs(database.clock() - time.time()) < 2


@BOTH
def test_a_write_that_fails_leaves_nothing(database: Database) -> None:
    def fails() -> None:
        with database.write() as connection:
            connection.execute(insert(runners).values(name="r", started_at=0, seen_at=0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with database.read() as connection:
        assert connection.execute(select(runners)).all() == []


def test_the_embedded_database_is_in_wal_mode_and_enforces_its_keys(database: Database) -> None:
    with database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1


@pytest.mark.parametrize(
    "url", ["nonsense", "mysql://host/name", "sqlite://", "sqlite:///:memory:", "oracle://u:secret@h/n"]
)
def test_a_database_that_is_not_known_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidSettings, match="AUTOAC_DATABASE_URL") as caught:
        read_url(url)
    assert "secret" not in str(caught.value)


def test_postgresql_is_reached_with_psycopg() -> None:
    for name in ("postgresql", "postgres", "postgresql+psycopg2"):
        assert read_url(f"{name}://u@h/n").drivername == "postgresql+psycopg"


def test_a_database_that_is_away_is_an_operational_error() -> None:
    database = Database("postgresql://nobody@127.0.0.1:9/none")
    with pytest.raises(OperationalError):
        database.clock()
    database.close()
