"""create_app(settings): the routes, and the one table from errors to answers."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import anyio
import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from autoac.api.errors import (
    BodyTooLarge,
    BodyTooSlow,
    Busy,
    MalformedRequest,
    NotJson,
    ServiceError,
    SolverDied,
    SolveTimedOut,
    Unauthorised,
    Undecodable,
    UnsupportedBody,
)
from autoac.api.problems import (
    URN,
    Held,
    InfeasibleConstraintsProblem,
    InfeasibleProblem,
    InvalidProblem,
    LimitProblem,
    OutOfTimeProblem,
    Problem,
    ProblemResponse,
    VersionProblem,
    schemas,
)
from autoac.api.request import PolicyRequest
from autoac.api.routes import Service, open_router, router
from autoac.api.settings import Settings
from autoac.api.solver import Solve, SpawnedSolver
from autoac.planner.errors import (
    InfeasibleBudget,
    InfeasibleConstraints,
    InvalidBudget,
    InvalidConstraints,
    MalformedProfile,
    PlannerError,
    SolverOutOfTime,
    UnknownVersion,
)
from autoac.planner.policy import Policy, tool_versions

log = structlog.get_logger("autoac.api")

MOST_CHARACTERS = 200  # of a complaint: it may quote a name that the client chose
MOST_HELD = 100  # of what is live at a peak


def _sizes(error: InfeasibleBudget) -> dict[str, Any]:
    return {
        "budget_bytes": error.budget,
        "proven_floor_bytes": error.proven_floor,
        "smallest_found_bytes": error.smallest_found,
        "peak_at": error.peak_at,
        "live": [Held(nbytes=h.nbytes, name=h.name, why=h.why) for h in error.live[:MOST_HELD]],
    }


def problem_of(error: Exception) -> Problem:
    """The one table: what a client is told of each error.

    Nothing in it comes from `str()` of an error that is not ours, and nothing from the values of the
    body but names: neither paths of the server nor its input come back.
    """
    text = str(error)
    match error:
        case NotJson():
            return _problem(Problem, 400, "not-json", "The body is not JSON", text)
        case Undecodable():
            return _problem(Problem, 400, "undecodable", "The body cannot be decoded", text)
        case Unauthorised():
            return _problem(Problem, 401, "unauthorised", "A token is needed", text)
        case BodyTooSlow():
            return _problem(Problem, 408, "body-too-slow", "The body took too long", text)
        case BodyTooLarge(limit=limit):
            return _problem(
                LimitProblem, 413, "body-too-large", "The body is too large", text, limit_bytes=limit
            )
        case UnsupportedBody():
            return _problem(
                Problem, 415, "unsupported-body", "The body's type or coding is not read here", text
            )
        case MalformedRequest(problems=found):
            return _invalid("malformed-request", "Not a valid request", found)
        case MalformedProfile(problems=found):
            return _invalid("malformed-profile", "Not a valid profile", found)
        case UnknownVersion(format=format, known=known):
            text = f"this service reads version {known} of {format}"
            return _problem(
                VersionProblem, 422, "unknown-version", "Another version", text, format=format, known=known
            )
        case InvalidBudget():
            return _problem(Problem, 422, "invalid-budget", "Not a budget", text)
        case InvalidConstraints():
            return _problem(Problem, 422, "invalid-constraints", "Constraints that cannot be met", text)
        case InfeasibleConstraints(culprits=culprits):
            return _problem(
                InfeasibleConstraintsProblem,
                422,
                "infeasible-constraints",
                "No plan fits in the budget under the constraints",
                text,
                **_sizes(error),
                culprits=list(culprits),
            )
        case InfeasibleBudget():
            return _problem(
                InfeasibleProblem,
                422,
                "infeasible-budget",
                "No plan fits in the budget",
                text,
                **_sizes(error),
            )
        case SolverDied():
            return _problem(Problem, 500, "solver-died", "The solver died", text)
        case Busy():
            return _problem(Problem, 503, "busy", "Too many requests wait", text)
        case SolverOutOfTime(time_limit_s=limit) | SolveTimedOut(limit_s=limit):
            return _problem(
                OutOfTimeProblem,
                504,
                "solver-out-of-time",
                "The solver ran out of time",
                text,
                time_limit_s=limit,
            )
        case HTTPException(status_code=status):
            return _problem(Problem, status, None, HTTPStatus(status).phrase, HTTPStatus(status).description)
        case RequestValidationError():
            return _invalid(
                "malformed-request", "Not a valid request", [_place(e) for e in error.errors()[:5]]
            )
        case _:
            return _problem(Problem, 500, None, "Internal server error", "the service's log says more")


def _problem(
    kind: type[Problem], status: int, slug: str | None, title: str, detail: str, **members: Any
) -> Problem:
    urn = URN + slug if slug else "about:blank"
    return kind(type=urn, title=title, status=status, detail=detail, **members)


def _invalid(slug: str, title: str, found: list[str] | tuple[str, ...]) -> Problem:
    lines = [line[:MOST_CHARACTERS] for line in found]
    return _problem(InvalidProblem, 422, slug, title, "; ".join(lines), problems=lines)


def _place(complaint: dict[str, Any]) -> str:
    return f"{'.'.join(map(str, complaint['loc']))}: {complaint['msg']}"


def _headers(error: Exception) -> dict[str, str]:
    match error:
        case Unauthorised():
            return {"WWW-Authenticate": "Bearer"}
        case UnsupportedBody():
            return {"Accept": "application/json", "Accept-Encoding": "zstd"}
        case Busy(retry_after_s=seconds):
            return {"Retry-After": str(seconds)}
        case HTTPException(headers=headers):
            return dict(headers or {})
        case _:
            return {}


async def _explain(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    if problem.status >= 500:
        log.warning("no policy", problem=problem.type, status=problem.status, detail=problem.detail)
    return ProblemResponse(problem, _headers(error))


async def _nobody_reads(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nginx's number for a client that went away


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """FastAPI's document, with the models that the routes name by reference."""
        if not self.openapi_schema:
            components = super().openapi().setdefault("components", {})
            components.setdefault("schemas", {}).update(schemas(Policy, PolicyRequest))
        assert self.openapi_schema is not None
        return self.openapi_schema


def create_app(settings: Settings, solve: Solve | None = None) -> FastAPI:
    """The service as an ASGI app. It starts nothing and holds nothing open, so it has no lifespan.

    Args:
        settings: how it runs.
        solve: what solves a decoded request; by default a child process for each.
    """
    solver = solve or SpawnedSolver(
        settings.solve_time_limit_s, settings.solve_grace_s, settings.solve_memory_bytes
    )
    # No docs pages: FastAPI's load their scripts from elsewhere.
    app = _App(title="autoac", version=tool_versions()["autoac"], docs_url=None, redoc_url=None)
    app.state.service = Service(settings, solver, anyio.Semaphore(settings.solves_at_once))
    app.include_router(open_router)
    app.include_router(router)
    for kind in (PlannerError, ServiceError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _explain)
    app.add_exception_handler(ClientDisconnect, _nobody_reads)
    return app
