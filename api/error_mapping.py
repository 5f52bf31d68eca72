"""The one table from errors to answers."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from autoac.api.errors import (
    BodyTooLarge,
    BodyTooSlow,
    Busy,
    Forbidden,
    InUse,
    JobCancelled,
    MalformedRequest,
    NotFound,
    NotJson,
    OtherHost,
    PreconditionFailed,
    PreconditionRequired,
    SolverDied,
    SolveTimedOut,
    TooManyJobs,
    TooManyStreams,
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
    QueueProblem,
    VersionProblem,
)
from autoac.api.storage.database import DatabaseNotReady, is_away
from autoac.planner.errors import (
    InfeasibleBudget,
    InfeasibleConstraints,
    InvalidBudget,
    InvalidConstraints,
    MalformedProfile,
    SolverOutOfTime,
    UnknownVersion,
)

DATABASE_RETRY_S = 5
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
            return _problem(Problem, 401, "unauthorised", "A key is needed", text)
        case Forbidden():
            return _problem(Problem, 403, "forbidden", "The key does not allow this", text)
        case NotFound():
            return _problem(Problem, 404, "not-found", "There is no such thing", text)
        case BodyTooSlow():
            return _problem(Problem, 408, "body-too-slow", "The body took too long", text)
        case InUse():
            return _problem(Problem, 409, "in-use", "Something else names it", text)
        case JobCancelled():
            return _problem(Problem, 409, "job-cancelled", "The job was cancelled", text)
        case PreconditionFailed():
            return _problem(Problem, 412, "precondition-failed", "Somebody was faster", text)
        case BodyTooLarge(limit=limit):
            return _problem(
                LimitProblem, 413, "body-too-large", "The body is too large", text, limit_bytes=limit
            )
        case UnsupportedBody():
            return _problem(
                Problem, 415, "unsupported-body", "The body's type or coding is not read here", text
            )
        case OtherHost():
            return _problem(Problem, 421, "other-host", "Not under this name", text)
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
        case PreconditionRequired():
            return _problem(
                Problem, 428, "precondition-required", "If-Match or If-None-Match is needed", text
            )
        case TooManyJobs(limit=limit):
            return _problem(
                QueueProblem, 429, "too-many-jobs", "Too many jobs in the queue", text, limit=limit
            )
        case TooManyStreams(limit=limit):
            return _problem(
                QueueProblem, 429, "too-many-streams", "Too many event streams", text, limit=limit
            )
        case SolverDied():
            return _problem(Problem, 500, "solver-died", "The solver died", text)
        case Busy():
            return _problem(Problem, 503, "busy", "Too many requests wait", text)
        case _ if is_away(error):
            text = f"the database is away or takes no writes; ask again in {DATABASE_RETRY_S} s"
            return _problem(Problem, 503, "database-away", "The database is away", text)
        case DatabaseNotReady():
            return _problem(Problem, 503, "database-not-ready", "The database has other tables", text)
        case SolverOutOfTime():
            return _problem(
                OutOfTimeProblem,
                504,
                "solver-out-of-time",
                "The solver ran out of time",
                text,
                time_limit_s=error.time_limit_s,
                proven_floor_bytes=error.proven_floor,
                smallest_found_bytes=error.smallest_found,
            )
        case SolveTimedOut(limit_s=limit):
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


def headers_of(error: Exception) -> dict[str, str]:
    """What the answer to an error says in its head, beside the problem."""
    match error:
        case Unauthorised():
            return {"WWW-Authenticate": "Bearer"}
        case UnsupportedBody():
            return {"Accept": "application/json", "Accept-Encoding": "zstd"}
        case (
            Busy(retry_after_s=seconds)
            | TooManyJobs(retry_after_s=seconds)
            | TooManyStreams(retry_after_s=seconds)
        ):
            return {"Retry-After": str(seconds)}
        case _ if is_away(error):
            return {"Retry-After": str(DATABASE_RETRY_S)}
        case HTTPException(headers=headers):
            return dict(headers or {})
        case _:
            return {}
