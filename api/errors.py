"""Errors of the service. The planner has its own.

    ServiceError
    +-- NotJson               the body is not a JSON document
    +-- Undecodable           the body does not match its Content-Encoding
    +-- MalformedRequest      the body is JSON but not a valid request
    +-- Unauthorised          the key is missing or unknown
    +-- Forbidden             the key's scope does not allow this
    +-- OtherHost             a request without a key names another machine as its host
    +-- NotFound              no profile, policy or job of that name
    +-- InUse                 a job still needs what would be deleted, or a name is taken
    +-- KeyLimit
    |   +-- TooManyJobs       the key has reached its limit of queued jobs
    |   +-- TooManyStreams    the key has reached its limit of event streams
    +-- JobCancelled          the job of the request was cancelled
    +-- BodyTooSlow           the body took too long to arrive
    +-- BodyTooLarge          the body is larger than the limit, as sent or decoded
    +-- UnsupportedBody       unsupported media type or content coding
    +-- Busy                  the limit of waiting requests is reached
    +-- ChildTimedOut
    |   +-- BodyCheckTimedOut checking the body took too long
    |   +-- SolveTimedOut     the child process did not answer in time and was killed
    +-- SolverDied            the child process died
    +-- DatabaseNotReady      the tables are those of another release

JobFailed is none of them: it carries the problem document of a job that failed. Each of the others has the
status, the kind and the title of its problem document as attributes of its class. All of them pickle, since
the child that solves raises some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from autoac.planner.units import format_bytes


class ServiceError(Exception):
    """Base of the errors of the service itself."""

    status: ClassVar[int] = 500
    kind: ClassVar[str]  # the end of the problem's type
    title: ClassVar[str]
    headers: Mapping[str, str] = {}  # of the answer

    def members(self) -> dict[str, Any]:
        """Return what the problem document has in addition to its text."""
        return {}


class NotJson(ServiceError):
    """The body is not a JSON document."""

    status, kind, title = 400, "not-json", "The body is not JSON"


class Undecodable(ServiceError):
    """The body does not match its Content-Encoding."""

    status, kind, title = 400, "undecodable", "The body cannot be decoded"


class MalformedRequest(ServiceError):
    """The body is JSON but not a valid request. `problems` are the first few complaints."""

    status, kind, title = 422, "malformed-request", "Not a valid request"

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "not a valid request: " + "; ".join(self.problems)

    def members(self) -> dict[str, Any]:
        return {"problems": self.problems}


class Unauthorised(ServiceError):
    """The request needs a key and has none, or an unknown one."""

    status, kind, title = 401, "unauthorised", "A key is needed"
    headers: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}


class OtherHost(ServiceError):
    """A request without a key names another machine as its host: see NOTE [ Names of this machine ]."""

    status, kind, title = 421, "other-host", "The service does not answer to this host name"


class Forbidden(ServiceError):
    """The key's scope does not allow this."""

    status, kind, title = 403, "forbidden", "The key does not allow this"


class NotFound(ServiceError):
    """A profile, policy, job, key or file does not exist."""

    status, kind, title = 404, "not-found", "Not found"


class InUse(ServiceError):
    """A job still needs what would be deleted, or a key has the name already."""

    status, kind, title = 409, "in-use", "Still in use"


class KeyLimit(ServiceError):
    """A key has reached a limit of its own."""

    status = 429

    def __init__(self, limit: int, retry_after_s: int) -> None:
        self.limit, self.retry_after_s = limit, retry_after_s
        self.headers = {"Retry-After": str(retry_after_s)}
        super().__init__(limit, retry_after_s)

    def members(self) -> dict[str, Any]:
        return {"limit": self.limit}


class TooManyJobs(KeyLimit):
    """A key has reached its limit of queued jobs."""

    kind, title = "too-many-jobs", "Too many jobs in the queue"

    def __str__(self) -> str:
        return (
            f"this key has {self.limit} jobs in the queue, its limit; retry in {self.retry_after_s} s, "
            "or cancel a job with DELETE /v1/jobs/ID"
        )


class TooManyStreams(KeyLimit):
    """A key has reached its limit of event streams."""

    kind, title = "too-many-streams", "Too many event streams"

    def __str__(self) -> str:
        return f"this key has {self.limit} open event streams, its limit; close one, or poll the job"


class JobCancelled(ServiceError):
    """The job of the request was cancelled."""

    status, kind, title = 409, "job-cancelled", "The job was cancelled"


class JobFailed(Exception):
    """A job failed. `problem` is its problem document as JSON, `status` its HTTP status."""

    def __init__(self, problem: str, status: int) -> None:
        self.problem, self.status = problem, status
        super().__init__(problem, status)


class BodyTooSlow(ServiceError):
    """The body did not arrive in time."""

    status, kind, title = 408, "body-too-slow", "The body took too long"


class BodyTooLarge(ServiceError):
    """The body has more than `limit` bytes in its `form`: "as sent" or "decoded"."""

    status, kind, title = 413, "body-too-large", "The body is too large"

    def __init__(self, form: str, limit: int) -> None:
        self.form, self.limit = form, limit
        super().__init__(form, limit)

    def __str__(self) -> str:
        return f"the body, {self.form}, must have at most {format_bytes(self.limit)}"

    def members(self) -> dict[str, Any]:
        return {"limit_bytes": self.limit}


class UnsupportedBody(ServiceError):
    """The service does not read this media type or content coding."""

    status, kind, title = 415, "unsupported-body", "Unsupported type or coding of the body"
    headers: Mapping[str, str] = {"Accept": "application/json", "Accept-Encoding": "zstd"}


class Busy(ServiceError):
    """The limit of waiting requests is reached; `retry_after_s` says when to try again."""

    status, kind, title = 503, "busy", "Too many requests wait"

    def __init__(self, retry_after_s: int) -> None:
        self.retry_after_s = retry_after_s
        self.headers = {"Retry-After": str(retry_after_s)}
        super().__init__(retry_after_s)

    def __str__(self) -> str:
        return f"too many requests wait; retry in {self.retry_after_s} s"


class ChildTimedOut(ServiceError):
    """A child process was killed after `limit_s` seconds."""

    status = 504

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        super().__init__(limit_s)

    def members(self) -> dict[str, Any]:
        return {"time_limit_s": self.limit_s}


class BodyCheckTimedOut(ChildTimedOut):
    """The child process that checked the body was killed after `limit_s` seconds."""

    kind, title = "body-too-slow-to-read", "Checking the body took too long"

    def __str__(self) -> str:
        return (
            f"the body must be checked within {self.limit_s:g} s; send fewer ops, or ask a service less busy"
        )


class SolveTimedOut(ChildTimedOut):
    """The child process was killed after `limit_s` seconds, which include its start and its reading."""

    kind, title = "solver-out-of-time", "The solver ran out of time"

    def __str__(self) -> str:
        return f"the solver gave no answer in {self.limit_s:g} s and was stopped"


class SolverDied(ServiceError):
    """The child process ended without an answer."""

    kind, title = "solver-died", "The solver died"


class DatabaseNotReady(ServiceError):
    """The database has other tables than this release needs. `move` is the next step for the operator."""

    status, kind, title = 503, "database-not-ready", "The tables are those of another release"

    def __init__(self, reason: str, move: str) -> None:
        self.reason, self.move = reason, move
        super().__init__(reason, move)

    def __str__(self) -> str:
        return f"{self.reason}: {self.move}"
