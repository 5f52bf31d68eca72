"""Build the app: its routes, the state that they share, and the answers to errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import structlog
from anyio import to_thread
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autoac.api.error_mapping import documented, headers_of, problem_of, problem_response
from autoac.api.errors import DatabaseNotReady, JobFailed, ServiceError
from autoac.api.problems import MEDIA_TYPE, URN, schemas
from autoac.api.request_reader import RequestReader
from autoac.api.requests import FloorRequest, FrontierRequest, PolicyRequest
from autoac.api.routes import ROUTERS
from autoac.api.routes.results import DifferenceView, FloorView, FrontierView, JobResult
from autoac.api.routes.views import JobView
from autoac.api.service import Service
from autoac.api.settings import Settings
from autoac.api.solving import EmbeddedWorker, embedded_worker
from autoac.api.solving.child_process import Solver, SpawnedSolver
from autoac.api.solving.job_runner import JobRunner
from autoac.api.storage import queue_of
from autoac.api.storage.database import AWAY, Database, cause_of
from autoac.api.storage.job_requests import JobRequests
from autoac.api.storage.job_runs import JobRuns
from autoac.api.storage.job_store import JobStore
from autoac.api.storage.keys import Authenticator
from autoac.api.telemetry.logs import RequestLog
from autoac.api.telemetry.metrics import Metrics
from autoac.planner.errors import PlannerError
from autoac.planner.formats.policy import Policy, tool_versions
from autoac.planner.formats.profile import Profile

log = structlog.get_logger("autoac.api")

BODIES = (Policy, Profile, PolicyRequest, FrontierRequest, FloorRequest)
ROUTES = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
RESULTS = (JobView, FrontierView, FloorView, JobResult, DifferenceView)


async def _explain(request: Request, error: Exception) -> Response:
    metrics = request.app.state.service.metrics
    if isinstance(error, JobFailed):
        metrics.errors.labels("job-failed").inc()
        return Response(error.problem, error.status, media_type=MEDIA_TYPE)
    if isinstance(error, HTTPException) and error.status_code == 405:
        error = HTTPException(405, headers={"Allow": ", ".join(sorted(_allowed(request.scope["path"])))})
    if isinstance(error, ProgrammingError):
        error = await _not_ready(request.app.state.service.database) or error
    problem = problem_of(error)
    metrics.errors.labels(problem.type.removeprefix(URN)).inc()
    if problem.type == "about:blank" and problem.status == 500:
        log.error("a bug", exc_info=error)
    elif problem.status >= 500:
        cause = cause_of(error)
        log.warning(
            "no answer", problem=problem.type, status=problem.status, detail=problem.detail, cause=cause
        )
    return problem_response(problem, headers_of(error))


def _allowed(path: str) -> set[str]:
    """Return the methods of all routes of a path; FastAPI only names those of the first route it finds."""
    methods = {m for route in ROUTES if route.path_regex.match(path) for m in route.methods or ()}
    return methods | {"HEAD"} if "GET" in methods else methods


class _HeadAsGet:
    """Answer HEAD with the head of the answer to GET. ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") != "HEAD":
            await self.app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        as_get = {**scope, "method": "GET"}
        try:
            await self.app(as_get, receive, send_head)
        finally:
            scope["route"] = as_get.get("route")  # for the log and the counters


async def _not_ready(database: Database) -> DatabaseNotReady | None:
    """Return the error if the tables are those of another release: the likely cause of a missing table."""
    with suppress(*AWAY):
        try:
            await to_thread.run_sync(database.check)
        except DatabaseNotReady as error:
            return error
    return None


async def _client_is_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nginx's number for a client that went away


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Return FastAPI's document with the models that the routes name by reference."""
        if not self.openapi_schema:
            components = super().openapi().setdefault("components", {})
            components.setdefault("schemas", {}).update(schemas(*BODIES, serialized=RESULTS))
        assert self.openapi_schema is not None
        return self.openapi_schema


def create_app(
    settings: Settings,
    solver: Solver | None = None,
    database: Database | None = None,
    on_worker_failure: Callable[[], None] = lambda: None,
) -> FastAPI:
    """Return the service as an ASGI app. Its lifespan opens the database and runs the embedded worker.

    Args:
        settings: the configuration.
        solver: reads and solves requests; by default in a child process for each body.
        database: the storage; by default the database of the settings.
        on_worker_failure: called if the embedded worker ends by a bug; /livez is 503 from then on.

    Raises:
        InvalidSettings: the settings name no usable database.
    """
    solver = solver or SpawnedSolver.of(settings)
    database = database or Database(settings.url)
    queue, metrics = queue_of(database), Metrics()
    reader = RequestReader(settings, solver)
    runner = JobRunner(settings, JobRuns(database, settings, queue), solver, metrics)
    service = Service(
        settings=settings,
        database=database,
        jobs=JobStore(database),
        requests=JobRequests(database, settings, queue),
        metrics=metrics,
        authenticator=Authenticator(settings, database),
        reader=reader,
        worker=embedded_worker(database, runner) if settings.runs_embedded else None,
    )

    async def run_jobs(worker: EmbeddedWorker) -> None:
        try:
            await worker.serve()
        except Exception as error:
            log.critical("the runner has ended; this process needs a restart", exc_info=error)
            service.worker_failed = True
            on_worker_failure()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        prepare = database.upgrade if database.is_sqlite else lambda: _warn_unless_ready(database)
        await to_thread.run_sync(prepare)
        async with anyio.create_task_group() as group:
            if service.worker is not None:
                group.start_soon(run_jobs, service.worker)
            yield
            group.cancel_scope.cancel()
        database.close()

    # No docs pages: FastAPI's load their scripts from elsewhere.
    app = _App(
        title="autoac",
        version=tool_versions()["autoac"],
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=documented(),
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    kinds = (PlannerError, ServiceError, JobFailed, DBAPIError, PoolTimeout)
    for kind in (*kinds, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _explain)
    app.add_exception_handler(ClientDisconnect, _client_is_gone)
    app.add_middleware(_HeadAsGet)
    app.add_middleware(RequestLog, metrics=metrics)
    return app


def _warn_unless_ready(database: Database) -> None:
    """Log at the start what /readyz will report; `autoac db upgrade` creates the tables of PostgreSQL."""
    try:
        database.check()
    except DatabaseNotReady as error:
        log.warning(str(error))
    except AWAY as error:
        log.warning("the database is away", cause=cause_of(error))
