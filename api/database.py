"""One database for both sizes: SQLite in a file, or PostgreSQL. Connections, the clock, and migrations.

NOTE [ Transactions ]

`read()` and `write()` are the only ways in. A write takes SQLite's write lock at its start (BEGIN
IMMEDIATE): a transaction that reads and then writes would otherwise fail at once, whatever the timeout, when
another one wrote in between. On PostgreSQL the same code runs under READ COMMITTED; what must not happen
twice is settled by a unique index or by a compare-and-set, and what counts before it writes takes `lock`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from alembic.command import upgrade as alembic_upgrade
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, Float, create_engine, event, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from autoac.api.settings import InvalidSettings

MIGRATIONS = Path(__file__).parent / "migrations"
SQLITE_WAIT_S = 30.0
POOL = 20


class DatabaseNotReady(Exception):
    """The database has other tables than this release needs. `autoac db upgrade` is the next move."""


class now(FunctionElement[float]):
    """Seconds since 1970 by the database's clock: machines may disagree, and leases compare times."""

    type = Float()
    inherit_cache = True


@compiles(now, "sqlite")
def _now_sqlite(element: Any, compiler: Any, **how: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _now_postgresql(element: Any, compiler: Any, **how: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


class Database:
    """An engine, and how it is used: see NOTE [ Transactions ]. Safe for many threads."""

    def __init__(self, url: str) -> None:
        """Raises: InvalidSettings: `url` is of no database that is known, or its driver is absent."""
        self.url = read_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._engine = _sqlite(self.url) if self.is_sqlite else _postgresql(self.url)
        self._glances = (
            _sqlite(self.url, timeout_s=0.0, pool_size=1, max_overflow=0) if self.is_sqlite else None
        )
        self._writer = self._engine.execution_options(autoac_write=True)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        with self._engine.connect() as connection:
            yield connection

    @contextmanager
    def glance(self) -> Iterator[Connection]:
        """As `read`, for a few rows by an index, on the event loop itself: on SQLite that takes less than to
        hand it to a thread. Its connection is its own, so it waits for no thread and for no writer.
        """
        assert self._glances is not None
        with self._glances.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that writes; committed at the end, rolled back on an error."""
        with self._writer.begin() as connection:
            yield connection

    def lock(self, connection: Connection, name: str) -> None:
        """Until the transaction ends, nobody else holds the lock `name`. SQLite has one writer anyway."""
        if not self.is_sqlite:
            connection.execute(
                text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"), {"name": "autoac " + name}
            )

    def clock(self) -> float:
        """The database's time, in seconds since 1970. Fails when the database is away."""
        with self.read() as connection:
            return float(connection.scalar(now()) or 0.0)

    def upgrade(self) -> None:
        """Bring the tables to this release, those of the job queue included."""
        if self.is_sqlite and self.url.database:
            Path(self.url.database).parent.mkdir(parents=True, exist_ok=True)
        with self.write() as connection:
            # Two replicas that start at once would both migrate.
            self.lock(connection, "migrations")
            config = Config()
            config.set_main_option("script_location", str(MIGRATIONS))
            config.attributes["connection"] = connection
            alembic_upgrade(config, "head")
            if not self.is_sqlite:
                _install_queue(connection)

    def revision(self) -> str | None:
        """The migration that the tables are at."""
        with self.read() as connection:
            return MigrationContext.configure(connection).get_current_revision()

    def check(self) -> None:
        """That the tables are those of this release.

        Raises:
            DatabaseNotReady: they are not.
        """
        found, wanted = self.revision(), newest_revision()
        if found != wanted:
            raise DatabaseNotReady(
                f"the database is at migration {found or 'none'} and this release needs {wanted}: "
                "run `autoac db upgrade`"
            )

    def close(self) -> None:
        """Let go of all connections."""
        self._engine.dispose()
        if self._glances is not None:
            self._glances.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def newest_revision() -> str:
    """The last migration that this release has."""
    head = ScriptDirectory(str(MIGRATIONS)).get_current_head()
    assert head is not None
    return head


def read_url(url: str) -> URL:
    """A database's URL, with psycopg 3 as the driver of PostgreSQL.

    Raises:
        InvalidSettings: it is no URL, or of another kind of database. Never repeats it: it has a password.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise InvalidSettings("AUTOAC_DATABASE_URL: not a URL such as postgresql://user@host/name") from None
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise InvalidSettings("AUTOAC_DATABASE_URL: SQLite needs a file, as in sqlite:////srv/autoac.db")
        return parsed.set(drivername="sqlite")
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise InvalidSettings(f"AUTOAC_DATABASE_URL: {backend} is neither sqlite nor postgresql")


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
            "AUTOAC_DATABASE_URL: PostgreSQL needs psycopg; install autoac[postgres]"
        ) from None


def _install_queue(connection: Connection) -> None:
    """procrastinate's own tables; from its package, which alone knows them."""
    from procrastinate.schema import SchemaManager

    if connection.scalar(text("SELECT to_regclass('procrastinate_jobs')")) is None:
        connection.exec_driver_sql(SchemaManager.get_schema().replace("%", "%%"))
