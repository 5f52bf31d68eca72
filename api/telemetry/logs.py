"""Request ids, one log line for each request, and the counters of requests."""

from __future__ import annotations

import logging
import re
import secrets
import sys
import time
from typing import Any

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autoac.api.telemetry.metrics import Metrics

HEADER = b"x-request-id"
NO_SNIFF = (b"x-content-type-options", b"nosniff")
SANE = re.compile(r"[A-Za-z0-9._:-]{1,64}")
QUIET = ("/livez", "/readyz", "/metrics")  # requested every few seconds

log = structlog.get_logger("autoac.http")


def configure() -> None:
    """Write log lines as JSON to stderr, each with the id of its request; those of libraries, too."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=_to_stderr,
    )
    if logging.lastResort is not None:  # the handler of loggers without one: warnings and errors to stderr
        logging.lastResort.setFormatter(_formatter())


def uvicorn_logs() -> dict[str, Any]:
    """Return the logging configuration that makes uvicorn's lines look like ours."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": _formatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
        "loggers": {"uvicorn": {"handlers": ["stderr"], "level": "INFO", "propagate": False}},
    }


def _formatter() -> structlog.stdlib.ProcessorFormatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso")],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
    )


def _to_stderr(*_: object) -> structlog.PrintLogger:
    # Looked up each time: a program that embeds the service may replace it.
    return structlog.PrintLogger(sys.stderr)


class RequestLog:
    """Give each request an id, its own if that is sane, and log its outcome. ASGI middleware.

    Each answer also forbids browsers to guess another type than the one it names.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((v.decode("latin-1") for k, v in scope["headers"] if k == HEADER), "")
        id = given if SANE.fullmatch(given) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = id
        started, status = time.monotonic(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message.setdefault("headers", [])
                headers.append((HEADER, id.encode()))
                if NO_SNIFF[0] not in dict(headers):  # pages bring it themselves
                    headers.append(NO_SNIFF)
                seconds = time.monotonic() - started
                self.metrics.request_seconds.labels(_route(scope)).observe(seconds)
            await send(message)

        with structlog.contextvars.bound_contextvars(request=id):
            try:
                await self.app(scope, receive, answer)
            finally:
                method = scope["method"] if scope["method"] in METHODS else "other"
                self.metrics.requests.labels(_route(scope), method, str(status)).inc()
                if scope["path"] not in QUIET:
                    log.info(
                        "request",
                        method=scope["method"],
                        path=scope["path"][:200],
                        status=status,
                        seconds=round(time.monotonic() - started, 4),
                        caller=scope["state"].get("caller"),
                    )


METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")


def _route(scope: Scope) -> str:
    """Return the route's pattern. Paths, which clients choose freely, must not make new counters."""
    return str(getattr(scope.get("route"), "path", "none"))
