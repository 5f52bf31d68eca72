"""The database, SQLite in a file or PostgreSQL: connections, its clock, and migrations.

NOTE [ Transactions ]

All access goes through `read()` and `write()`. A write takes SQLite's write lock at its start (BEGIN
IMMEDIATE). Otherwise a transaction that reads and then writes would fail at once, whatever the timeout, if
another one wrote in between. On PostgreSQL the same code runs under READ COMMITTED. A unique index or a
compare-and-set prevents what must not happen twice; code that counts before it writes takes `lock`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from alembic.command import upgrade as alembic_upgrade
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Float,
    Row,
    Select,
    Table,
    create_engine,
    event,
    insert,
    literal,
    make_url,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.sql.functions import FunctionElement

from autoac.api.errors import DatabaseNotReady, NotFound
from autoac.api.settings import InvalidSettings
from autoac.api.storage.tables import profiles
from autoac.planner.units import format_bytes

MIGRATIONS = Path(__file__).parent / "migrations"
SQLITE_WAIT_S = 30.0
POOL = 20
POSTGRES_WAITS = {
    "connect_timeout": "10",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
"""Parameters of libpq that end a connection within 30 s if its server vanishes without closing it.

The defaults of the system take a quarter of an hour to two hours. Parameters of the URL have precedence.
"""
ROOM = 16 << 20  # bytes on SQLite's disk; with less the next body may not fit

AWAY = (DBAPIError, PoolTimeout)
"""Errors of a database that is away, read-only, full, damaged or not upgraded. Try again later."""


def is_away(error: BaseException) -> bool:
    """Return True for an error of the database itself, False for an error of the values sent to it."""
    return isinstance(error, AWAY) and not isinstance(error, IntegrityError | DataError)


def cause_of(error: BaseException) -> str:
    """Return the database's own message, in one line."""
    return str(getattr(error, "orig", None) or error).partition("\n")[0]


class DatabaseReadOnly(Exception):
    """The database answers but takes no writes."""


class now(FunctionElement[float]):
    """Seconds since 1970 by the database's clock, since the clocks of machines may disagree."""

    type = Float()
    inherit_cache = True


@compiles(now, "sqlite")
def _now_sqlite(element: Any, compiler: Any, **how: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _now_postgresql(element: Any, compiler: Any, **how: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


def only_row(connection: Connection, query: Select[Any], missing: str) -> Row[Any]:
    """Return the one row of `query`.

    Raises:
        NotFound: there is none; the error says `missing`.
    """
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFound(missing)
    return row


def insert_once(connection: Connection, table: Table, values: dict[str, Any]) -> bool:
    """Insert a row; return False if its key is taken, perhaps by a transaction at the same time."""
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    made = dialect.insert(table).values(values).on_conflict_do_nothing().returning(literal(1))
    return connection.scalar(made) is not None


def newest_first(query: Select[Any], number: Column[Any], before: int | None, limit: int) -> Select[Any]:
    """Return `query` for a page of up to `limit` rows, starting below the number `before`."""
    query = query.order_by(number.desc()).limit(limit)
    return query if before is None else query.where(number < before)


class Database:
    """A connection pool and its transactions: see NOTE [ Transactions ]. Safe for many threads."""

    def __init__(self, url: str) -> None:
        """Connect lazily.

        Raises:
            InvalidSettings: `url` is not that of a supported database, or its driver is not installed.
        """
        self.url = read_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._engine = _sqlite(self.url) if self.is_sqlite else _postgresql(self.url)
        self._loop_engine = (
            _sqlite(self.url, timeout_s=0.0, pool_size=1, max_overflow=0) if self.is_sqlite else None
        )
        self._writer = self._engine.execution_options(autoac_write=True)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a transaction that only reads."""
        with self._engine.connect() as connection:
            yield connection

    @contextmanager
    def read_on_loop(self) -> Iterator[Connection]:
        """Open a read transaction for a few rows by an index, on the event loop itself.

        On SQLite that takes less time than handing it to a thread. The connection is separate, so it waits
        for no thread and for no writer.
        """
        assert self._loop_engine is not None
        with self._loop_engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction that writes; commit it at the end, roll it back on an error."""
        with self._writer.begin() as connection:
            yield connection

    def lock(self, connection: Connection, name: str) -> None:
        """Hold the lock `name` until the transaction ends. SQLite has one writer anyway."""
        if not self.is_sqlite:
            connection.execute(
                text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"), {"name": "autoac " + name}
            )

    def clock(self) -> float:
        """Return the database's time, in seconds since 1970."""
        with self.read() as connection:
            return float(connection.scalar(now()) or 0.0)

    def upgrade(self) -> None:
        """Bring the tables to this release, those of the job queue included.

        Raises:
            DatabaseNotReady: a newer release upgraded them.
        """
        if self.is_sqlite:
            _make_private(self._file)
        with self.write() as connection:
            # Two replicas that start at once would both migrate.
            self.lock(connection, "migrations")
            _refuse_unknown(MigrationContext.configure(connection).get_current_revision())
            config = Config()
            config.set_main_option("script_location", str(MIGRATIONS))
            config.attributes["connection"] = connection
            alembic_upgrade(config, "head")

    def exists(self) -> bool:
        """Return False if SQLite's file is not there yet. A PostgreSQL database always exists."""
        return not self.is_sqlite or self._file.exists()

    def revision(self) -> str | None:
        """Return the migration of the tables, or None if there are none."""
        with self.read() as connection:
            return MigrationContext.configure(connection).get_current_revision()

    def check(self) -> None:
        """Check that the tables are those of this release.

        Raises:
            DatabaseNotReady: the tables are those of another release.
        """
        found, newest = self.revision(), newest_revision()
        _refuse_unknown(found)
        if found != newest:
            raise DatabaseNotReady(
                f"the database is at migration {found or 'none'} and this release needs {newest}",
                "run `autoac db upgrade`",
            )

    def refuse_unknown(self) -> None:
        """Check that this release can upgrade the tables, unless the database is away: then go on.

        Raises:
            DatabaseNotReady: another release made the tables, so that waiting does not help.
        """
        try:
            found = self.revision()
        except AWAY:
            return
        _refuse_unknown(found)

    def check_writable(self) -> None:
        """Check, without writing, that the database takes writes.

        Raises:
            DatabaseReadOnly: the server is a standby or read-only, or SQLite's disk is read-only or full.
        """
        if self.is_sqlite:
            for path in (self._file, self._file.parent):
                if not os.access(path, os.W_OK):
                    raise DatabaseReadOnly(f"{path} cannot be written")
            free = shutil.disk_usage(self._file.parent).free
            if free < ROOM:
                raise DatabaseReadOnly(
                    f"the disk of {self._file} must have {format_bytes(ROOM)} free, got {format_bytes(free)}"
                )
            return
        with self.read() as connection:
            if connection.scalar(text("SHOW transaction_read_only")) == "on":
                raise DatabaseReadOnly("the server is read-only, or a standby")

    def try_write(self) -> None:
        """Write a profile of 1 MiB and roll it back, to find a full disk.

        Raises:
            DBAPIError: the write failed.
        """
        names = dict.fromkeys(("id", "model", "fingerprint", "device", "created_by"), "")
        row = names | dict.fromkeys(("ops", "plain_bytes", "created_at"), 0) | {"content": b"x" * (1 << 20)}
        with self._writer.connect() as connection:  # without a commit
            connection.execute(insert(profiles).values(row))

    @property
    def _file(self) -> Path:
        """Return SQLite's file."""
        return Path(self.url.database or "")

    def close(self) -> None:
        """Close all connections: those in use as they are returned."""
        event.listen(self._engine, "checkin", _close_returned)
        self._engine.dispose()
        if self._loop_engine is not None:
            self._loop_engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _close_returned(_: Any, record: ConnectionPoolEntry) -> None:
    record.invalidate()


def _refuse_unknown(found: str | None) -> None:
    """Raise DatabaseNotReady if `found` is a migration that this release does not have."""
    known = {script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()}
    if found is None or found in known:
        return
    raise DatabaseNotReady(
        f"the database is at migration {found}, which another release made; "
        f"this release knows migrations up to {newest_revision()}",
        "install that release here, restore an earlier backup, or start with an empty database",
    )


def _make_private(file: Path) -> None:
    """Create an empty file for its owner alone, unless it exists. SQLite gives its log the same mode."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def newest_revision() -> str:
    """Return the last migration of this release."""
    head = ScriptDirectory(str(MIGRATIONS)).get_current_head()
    assert head is not None
    return head


def read_url(url: str) -> URL:
    """Return a database's URL, with psycopg 3 as the driver of PostgreSQL.

    Raises:
        InvalidSettings: `url` is not a URL of a supported database. The message never repeats it, since it
            may have a password.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise InvalidSettings(
            "AUTOAC_DATABASE_URL must be a URL such as postgresql://user@host/name"
        ) from None
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise InvalidSettings(
                "AUTOAC_DATABASE_URL must name a file for SQLite, as in sqlite:////srv/autoac.db"
            )
        return parsed.set(drivername="sqlite")
    if backend in ("postgresql", "postgres"):
        waits = {name: value for name, value in POSTGRES_WAITS.items() if name not in parsed.query}
        return parsed.set(drivername="postgresql+psycopg").update_query_dict(waits)
    raise InvalidSettings(f"AUTOAC_DATABASE_URL must be of sqlite or postgresql, got {backend}")


def _sqlite(
    url: URL, *, timeout_s: float = SQLITE_WAIT_S, pool_size: int = POOL, max_overflow: int = POOL
) -> Engine:
    engine = create_engine(
        url, connect_args={"timeout": timeout_s}, pool_size=pool_size, max_overflow=max_overflow
    )

    @event.listens_for(engine, "connect")
    def connected(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # the transactions are ours, not the driver's
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}").fetchall()

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        writes = connection.get_execution_options().get("autoac_write")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _postgresql(url: URL) -> Engine:
    try:
        # pre_ping: a connection from before a restart of the database is replaced, not handed out.
        return create_engine(url, pool_pre_ping=True, pool_size=POOL, max_overflow=POOL)
    except (ModuleNotFoundError, NoSuchModuleError):
        raise InvalidSettings(
            "AUTOAC_DATABASE_URL: PostgreSQL needs psycopg; install autoac with its extra `postgres`"
        ) from None
