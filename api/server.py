"""Runs the service."""

from __future__ import annotations

import logging
import sys

import structlog
import uvicorn

from autoac.api.app import create_app
from autoac.api.settings import Settings


class RefusedToListen(ValueError):
    """The service would be open to other machines and has no token to ask for."""


def serve(*, host: str | None = None, port: int | None = None, token: str | None = None) -> None:
    """Listen until told to stop by SIGINT or SIGTERM. What is not given comes from the environment.

    Raises:
        InvalidSettings: a variable or an argument is not what it should be.
        RefusedToListen: `host` is reachable from elsewhere and there is no token.
    """
    settings = Settings.load(host=host, port=port, token=token)
    check_reach(settings)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_s)),
    )


def check_reach(settings: Settings) -> None:
    """That nobody else can reach the service, or that it has a token.

    Raises:
        RefusedToListen: neither.
    """
    if settings.token is None and not settings.on_loopback:
        raise RefusedToListen(
            f"{settings.host} can be reached from other machines, and there is no token: "
            "set AUTOAC_TOKEN to a secret of at least 16 characters, or listen on 127.0.0.1"
        )
