"""Map each error to the problem document and the headers of its answer."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from autoac.api import errors as service
from autoac.api.problems import (
    MEDIA_TYPE,
    REF,
    URN,
    InfeasibleConstraintsProblem,
    InfeasibleProblem,
    InvalidProblem,
    LimitProblem,
    OutOfTimeProblem,
    Problem,
    QueueProblem,
    VersionProblem,
)
from autoac.api.storage.database import DatabaseNotReady, is_away
from autoac.planner import errors as planner

DATABASE_RETRY_S = 5
MOST_CHARACTERS = 200  # of a complaint, which may quote a name that the client chose
MOST_HELD = 100  # items that are live at a peak

_TABLE: tuple[tuple[type[Exception], int, str, type[Problem], str], ...] = (
    (service.NotJson, 400, "not-json", Problem, "The body is not JSON"),
    (service.Undecodable, 400, "undecodable", Problem, "The body cannot be decoded"),
    (service.Unauthorised, 401, "unauthorised", Problem, "A key is needed"),
    (service.Forbidden, 403, "forbidden", Problem, "The key does not allow this"),
    (service.NotFound, 404, "not-found", Problem, "Not found"),
    (service.BodyTooSlow, 408, "body-too-slow", Problem, "The body took too long"),
    (service.InUse, 409, "in-use", Problem, "Still in use"),
    (service.JobCancelled, 409, "job-cancelled", Problem, "The job was cancelled"),
    (
        service.PreconditionFailed,
        412,
        "precondition-failed",
        Problem,
        "Precondition failed: the resource was modified",
    ),
    (service.BodyTooLarge, 413, "body-too-large", LimitProblem, "The body is too large"),
    (service.UnsupportedBody, 415, "unsupported-body", Problem, "Unsupported type or coding of the body"),
    (service.OtherHost, 421, "other-host", Problem, "The service does not answer to this host name"),
    (service.MalformedRequest, 422, "malformed-request", InvalidProblem, "Not a valid request"),
    (RequestValidationError, 422, "malformed-request", InvalidProblem, "Not a valid request"),
    (planner.MalformedProfile, 422, "malformed-profile", InvalidProblem, "Not a valid profile"),
    (planner.UnknownVersion, 422, "unknown-version", VersionProblem, "Unknown version of a format"),
    (planner.InvalidBudget, 422, "invalid-budget", Problem, "Not a valid budget"),
    (planner.InvalidConstraints, 422, "invalid-constraints", Problem, "Constraints that cannot be met"),
    (
        planner.InfeasibleConstraints,
        422,
        "infeasible-constraints",
        InfeasibleConstraintsProblem,
        "No plan fits in the budget under the constraints",
    ),
    (planner.InfeasibleBudget, 422, "infeasible-budget", InfeasibleProblem, "No plan fits in the budget"),
    (
        service.PreconditionRequired,
        428,
        "precondition-required",
        Problem,
        "If-Match or If-None-Match is needed",
    ),
    (service.TooManyJobs, 429, "too-many-jobs", QueueProblem, "Too many jobs in the queue"),
    (service.TooManyStreams, 429, "too-many-streams", QueueProblem, "Too many event streams"),
    (service.SolverDied, 500, "solver-died", Problem, "The solver died"),
    (service.Busy, 503, "busy", Problem, "Too many requests wait"),
    (DatabaseNotReady, 503, "database-not-ready", Problem, "The tables are those of another release"),
    (planner.SolverOutOfTime, 504, "solver-out-of-time", OutOfTimeProblem, "The solver ran out of time"),
    (
        service.BodyCheckTimedOut,
        504,
        "body-too-slow-to-read",
        OutOfTimeProblem,
        "Checking the body took too long",
    ),
    (service.SolveTimedOut, 504, "solver-out-of-time", OutOfTimeProblem, "The solver ran out of time"),
)
"""Error, status, slug of the type, model and title. The first row whose error matches counts."""


def documented() -> dict[int | str, dict[str, Any]]:
    """Return `responses=` of every route, for the OpenAPI document: all errors, by status.

    FastAPI's own `model` entry would declare the media type of the route, application/json.
    """
    titles: dict[int, dict[str, None]] = {}
    models: dict[int, dict[str, None]] = {}
    for _, status, _, model, title in _TABLE:
        titles.setdefault(status, {})[title] = None
        models.setdefault(status, {})[model.__name__] = None
    return {
        status: {
            "description": "; ".join(titles[status]),
            "content": {
                MEDIA_TYPE: {"schema": {"anyOf": [{"$ref": REF.format(model=name)} for name in names]}}
            },
        }
        for status, names in models.items()
    }


def problem_of(error: Exception) -> Problem:
    """Return what a client reads about an error.

    The text of an error of another library is never used, and no value of the body is repeated except names.
    So a client sees neither paths of the server nor its own input.
    """
    if is_away(error):
        detail = f"the database is away or takes no writes; ask again in {DATABASE_RETRY_S} s"
        return _problem(Problem, 503, "database-away", "The database is away", detail)
    for cls, status, slug, model, title in _TABLE:
        if isinstance(error, cls):
            members = _members(error)
            detail = members.pop("detail", str(error))
            used = {name: value for name, value in members.items() if name in model.model_fields}
            return _problem(model, status, slug, title, detail, **used)
    if isinstance(error, HTTPException):
        code = HTTPStatus(error.status_code)
        return _problem(Problem, code, None, code.phrase, code.description)
    return _problem(Problem, 500, None, "Internal server error", "the service's log says more")


def _problem(
    model: type[Problem], status: int, slug: str | None, title: str, detail: str, **members: Any
) -> Problem:
    urn = URN + slug if slug else "about:blank"
    return model(type=urn, title=title, status=status, detail=detail, **members)


def _members(error: Exception) -> dict[str, Any]:
    """Return the numbers and texts of an error by the names that problems give them."""
    match error:
        case service.MalformedRequest(problems=found) | planner.MalformedProfile(problems=found):
            return _complaints(found)
        case RequestValidationError():
            return _complaints([f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5]])
        case planner.UnknownVersion(format=format, known=known):
            return error.to_dict() | {"detail": f"this service reads version {known} of {format}"}
        case planner.InfeasibleBudget():
            members = error.to_dict()
            return members | {"live": members["live"][:MOST_HELD]}
        case planner.PlannerError():
            return error.to_dict()
        case service.BodyTooLarge(limit=limit):
            return {"limit_bytes": limit}
        case service.KeyLimit(limit=limit):
            return {"limit": limit}
        case service.ChildTimedOut(limit_s=limit):
            return {"time_limit_s": limit}
        case _:
            return {}


def _complaints(found: list[str] | tuple[str, ...]) -> dict[str, Any]:
    lines = [line[:MOST_CHARACTERS] for line in found]
    return {"problems": lines, "detail": "; ".join(lines)}


def headers_of(error: Exception) -> dict[str, str]:
    """Return the HTTP headers that go with the response to `error`, such as Retry-After."""
    match error:
        case service.Unauthorised():
            return {"WWW-Authenticate": "Bearer"}
        case service.UnsupportedBody():
            return {"Accept": "application/json", "Accept-Encoding": "zstd"}
        case service.Busy(retry_after_s=seconds) | service.KeyLimit(retry_after_s=seconds):
            return {"Retry-After": str(seconds)}
        case _ if is_away(error):
            return {"Retry-After": str(DATABASE_RETRY_S)}
        case HTTPException(headers=headers):
            return dict(headers or {})
        case _:
            return {}
