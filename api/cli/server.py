"""Runs the service."""

from __future__ import annotations

import resource
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn

from autoac.api.app import create_app
from autoac.api.cli.connections import HeadLimitedProtocol
from autoac.api.settings import InvalidSettings, Settings
from autoac.api.solving.child_process import Solver
from autoac.api.storage.database import Database
from autoac.api.storage.keys import any_key
from autoac.api.telemetry.logs import configure, uvicorn_logs


class RefusedToListen(InvalidSettings):
    """The service would be reachable from other machines without asking for a key."""


def serve(
    *,
    host: str | None = None,
    port: int | None = None,
    token: str | None = None,
    solver: Solver | None = None,
) -> None:
    """Listen until told to stop by SIGINT or SIGTERM. What is not given comes from the environment.

    Raises:
        InvalidSettings: a variable or an argument is not what it should be.
        RefusedToListen: `host` is reachable from elsewhere and there is no key.
        DatabaseNotReady: a newer release made the tables.
        SystemExit: with 1; it cannot listen, or its runner ended by an error and a restart is due.
    """
    settings = Settings.load(host=host, port=port, token=token)
    configure()
    database = Database(settings.url)
    if database.is_sqlite:
        database.upgrade()
    check_reach(settings, database)
    _raise_open_files()
    protocol: Any = partial(HeadLimitedProtocol, head_timeout_s=settings.head_timeout_s)
    failed = False

    def on_failure() -> None:
        nonlocal failed
        failed = server.should_exit = True

    config = uvicorn.Config(
        create_app(settings, solver, database, on_failure),
        host=settings.host,
        port=settings.port,
        server_header=False,
        proxy_headers=False,
        http=protocol,
        log_config=uvicorn_logs(),
        access_log=False,  # autoac.api.telemetry.logs writes a line for each request, with its id
        timeout_graceful_shutdown=max(1, round(settings.shutdown_s)),
    )
    server = uvicorn.Server(config)
    with suppress(KeyboardInterrupt):  # it has stopped as told
        server.run()
    if failed or not server.started:
        raise SystemExit(1)


def _raise_open_files() -> None:
    """Allow as many open files, and so connections, as the system lets this process have."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # some systems say a number here that they do not take
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_reach(settings: Settings, database: Database) -> None:
    """That nobody else can reach the service, or that it asks for keys.

    Raises:
        RefusedToListen: neither.
    """
    if settings.token is not None or settings.on_loopback:
        return
    with database.read() as connection:
        if any_key(connection):
            return
    raise RefusedToListen(
        f"{settings.host} can be reached from other machines, and there is no key: make one with "
        "`autoac keys create NAME`, or set AUTOAC_TOKEN to a secret of at least 16 characters, "
        "or listen on 127.0.0.1"
    )
