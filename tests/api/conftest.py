"""Fixtures of the service's tests, built from `service_fakes` in the same folder."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import structlog
from starlette.testclient import TestClient

sys.path.append(str(Path(__file__).parent))  # the import mode adds no folder by itself

from postgres import NoPostgres, Server
from service_app import Clock, InApp, Serve, Transport
from service_fakes import InProcess, chain_profile, save_all

from ac_client.service_client import connection, policy_requests
from autoac.api import Settings, create_app
from autoac.api.solving.child_process import Solver
from autoac.api.storage.database import Database
from autoac.planner.formats.profile import Profile


@pytest.fixture(scope="session")
def profile() -> Profile:
    """Return a step of three ops and three backward steps."""
    return chain_profile()


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AUTOAC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Drop log lines: tests read stdout, and each has another stderr."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())


@pytest.fixture
def anyio_backend() -> str:
    """Return the event loop that uvicorn uses."""
    return "asyncio"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collect the pauses of the client before further tries and looks at a job, without waiting."""
    clock = Clock([])
    for module in (connection, policy_requests):
        monkeypatch.setattr(module, "time", clock)
    return clock.slept


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an SQLite file with all tables, to be copied."""
    path = tmp_path_factory.mktemp("sqlite") / "template.sqlite3"
    database = Database(f"sqlite:///{path}")
    database.upgrade()
    database.close()
    return path


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """Run a PostgreSQL with a database `template_autoac` that has all tables."""
    try:
        server = Server.create()
    except NoPostgres as error:
        pytest.skip(f"no PostgreSQL: {error}")
    try:
        server.start()
        database = Database(server.database("template_autoac"))
        database.upgrade()
        database.close()
        yield server
    finally:
        server.remove()


@pytest.fixture
def size(request: pytest.FixtureRequest) -> str:
    """Return the kind of database: sqlite unless the test is parametrized."""
    return str(getattr(request, "param", "sqlite"))


@pytest.fixture
def database_url(
    size: str, sqlite_template: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[str]:
    """Return the URL of a database with all tables, for this test alone."""
    if size == "sqlite":
        path = tmp_path / "service.sqlite3"
        shutil.copy(sqlite_template, path)
        yield f"sqlite:///{path}"
        return
    server: Server = request.getfixturevalue("postgres")
    name = f"test_{secrets.token_hex(6)}"
    yield server.database(name, "template_autoac")
    server.drop(name)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """Open the database of this test."""
    opened = Database(database_url)
    yield opened
    opened.close()


@pytest.fixture
def serve(database_url: str) -> Iterator[Serve]:
    """Return a function that starts the service with its runner in this process and returns a client."""
    with ExitStack() as stack:

        def start(solver: Solver | None = None, **settings: Any) -> TestClient:
            settings = {"database_url": database_url, "runner": "embedded"} | settings
            app = create_app(Settings(**settings), solver or InProcess(save_all))
            client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
            return stack.enter_context(client)

        yield start


@pytest.fixture
def in_app(serve: Serve) -> Transport:
    """Return a function that starts the service in this process and returns a transport to it."""
    return lambda solver=None, **settings: InApp(serve(solver, **settings))
