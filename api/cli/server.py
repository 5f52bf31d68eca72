"""Run the service."""

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
    """Listen until SIGINT or SIGTERM. An argument that is None comes from the environment.

    Raises:
        InvalidSettings: a variable or an argument is not valid.
        RefusedToListen: other machines can reach `host`, and the service has neither key nor token.
        DatabaseNotReady: a newer release upgraded the tables.
        SystemExit: with 1, if the service cannot listen, or if its runner ended by a bug.
    """
    settings = Settings.load(host=host, port=port, token=token)
    configure()
    database = Database(settings.url)
    try:
        if database.is_sqlite:
            database.upgrade()
        else:
            database.refuse_unknown()
        check_reach(settings, database)
    except BaseException:  # from here on the app closes it
        database.close()
        raise
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
        access_log=False,  # telemetry/logs.py writes a line for each request
        timeout_graceful_shutdown=max(1, round(settings.shutdown_s)),
    )
    server = uvicorn.Server(config)
    with suppress(KeyboardInterrupt):  # stopped by SIGINT
        server.run()
    if failed or not server.started:
        raise SystemExit(1)


def _raise_open_files() -> None:
    """Raise the limit on open files, and so on connections, to the system's maximum."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # some systems report a limit that they do not accept
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_reach(settings: Settings, database: Database) -> None:
    """Check that only this machine can reach the service, or that it asks for keys.

    Raises:
        RefusedToListen: other machines can reach the service, and it has neither key nor token.
    """
    if settings.token is not None or settings.on_loopback:
        return
    with database.read() as connection:
        if any_key(connection):
            return
    raise RefusedToListen(
        f"{settings.host} can be reached from other machines, and no key exists: make one with "
        "`autoac keys create NAME`, or set AUTOAC_TOKEN to a secret of at least 16 characters, "
        "or listen on 127.0.0.1"
    )
