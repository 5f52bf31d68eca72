"""Map each error to the problem document and the headers of its answer."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from fastapi import Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from autoac.api import errors as service
from autoac.api.problems import MEDIA_TYPE, REF, URN, Problem
from autoac.api.storage.database import is_away
from autoac.planner import errors as planner

DATABASE_RETRY_S = 5
MOST_CHARACTERS = 200  # of a complaint, which may quote a name that the client chose
MOST_HELD = 100  # items that are live at a peak

_OF_PLANNER: dict[type[Exception], tuple[int, str, str]] = {
    RequestValidationError: (422, "malformed-request", "Not a valid request"),
    planner.MalformedProfile: (422, "malformed-profile", "Not a valid profile"),
    planner.UnknownVersion: (422, "unknown-version", "Unknown version of a format"),
    planner.InvalidBudget: (422, "invalid-budget", "Not a valid budget"),
    planner.InvalidConstraints: (422, "invalid-constraints", "Constraints that cannot be met"),
    planner.InfeasibleBudget: (422, "infeasible-budget", "No plan fits in the budget"),
    planner.SolverOutOfTime: (504, "solver-out-of-time", "The solver ran out of time"),
}
"""Status, kind and title of errors that are not ours. The first row whose error matches counts."""


def _known_errors() -> Iterator[tuple[int, str]]:
    """Yield status and title of each error that has a problem document of its own kind."""
    yield from ((status, title) for status, _, title in _OF_PLANNER.values())
    rest = service.ServiceError.__subclasses__()
    for cls in rest:
        rest += cls.__subclasses__()
        if hasattr(cls, "kind"):
            yield cls.status, cls.title


def documented() -> dict[int | str, dict[str, Any]]:
    """Return `responses=` of every route, for the OpenAPI document: all errors, by status.

    FastAPI's own `model` entry would declare the media type of the route, application/json.
    """
    titles: dict[int | str, dict[str, None]] = {}
    for status, title in _known_errors():
        titles.setdefault(status, {})[title] = None
    content = {MEDIA_TYPE: {"schema": {"$ref": REF.format(model="Problem")}}}
    return {status: {"description": "; ".join(of), "content": content} for status, of in titles.items()}


def problem_of(error: Exception) -> Problem:
    """Return what a client reads about an error.

    The text of an error of another library is never used, and no value of the body is repeated except names.
    So a client sees neither paths of the server nor its own input.
    """
    if is_away(error):
        detail = f"the database is away or takes no writes; ask again in {DATABASE_RETRY_S} s"
        return _problem(503, "database-away", "The database is away", detail=detail)
    if isinstance(error, service.ServiceError):
        return _problem(error.status, error.kind, error.title, **{"detail": str(error)} | _members(error))
    for cls, row in _OF_PLANNER.items():
        if isinstance(error, cls):
            return _problem(*row, **_members(error))
    if isinstance(error, HTTPException):
        code = HTTPStatus(error.status_code)
        return _problem(code, None, code.phrase, detail=code.description)
    return _problem(500, None, "Internal server error", detail="the service's log says more")


def _problem(status: int, kind: str | None, title: str, /, **members: Any) -> Problem:
    return Problem(type=URN + kind if kind else "about:blank", title=title, status=status, **members)


def _members(error: Exception) -> dict[str, Any]:
    """Return the numbers and texts of an error by the names that problems give them."""
    match error:
        case service.MalformedRequest(problems=found) | planner.MalformedProfile(problems=found):
            return _complaints(found)
        case RequestValidationError():
            return _complaints([f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5]])
        case planner.UnknownVersion(format=format, known=known):
            detail = f"this service reads version {known} of {format}"
            return {"format": format, "known": known, "detail": detail}
        case planner.InfeasibleBudget():
            members = error.to_dict()
            return members | {"live": members["live"][:MOST_HELD]}
        case planner.PlannerError():
            return error.to_dict()
        case service.ServiceError():
            return error.members()
        case _:
            return {}


def _complaints(found: list[str] | tuple[str, ...]) -> dict[str, Any]:
    lines = [line[:MOST_CHARACTERS] for line in found]
    return {"problems": lines, "detail": "; ".join(lines)}


def problem_response(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    """Return the response that carries a problem, with its status."""
    return Response(problem.to_json(), problem.status, headers, MEDIA_TYPE)


def headers_of(error: Exception) -> dict[str, str]:
    """Return the HTTP headers that go with the response to `error`, such as Retry-After."""
    if is_away(error):
        return {"Retry-After": str(DATABASE_RETRY_S)}
    if isinstance(error, service.ServiceError | HTTPException):
        return dict(error.headers or {})
    return {}
