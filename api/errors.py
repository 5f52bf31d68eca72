"""Errors of the service. The planner has its own.

    ServiceError
    +-- NotJson               the body is not a JSON document
    +-- Undecodable           the body does not match its Content-Encoding
    +-- MalformedRequest      the body is JSON but not a valid request
    +-- Unauthorised          the key is missing or unknown
    +-- Forbidden             the key's scope does not allow this
    +-- OtherHost             a request without a key names another machine as its host
    +-- NotFound              no profile, policy, alias or job of that name
    +-- InUse                 an alias or a job still needs what would be deleted
    +-- PreconditionFailed    If-Match or If-None-Match does not hold
    +-- PreconditionRequired  a move of an alias needs one of the two headers
    +-- KeyLimit
    |   +-- TooManyJobs       the key has reached its limit of queued jobs
    |   +-- TooManyStreams    the key has reached its limit of event streams
    +-- JobCancelled          the job of the request was cancelled
    +-- JobFailed             the job failed; carries its problem document
    +-- BodyTooSlow           the body took too long to arrive
    +-- BodyTooLarge          the body is larger than the limit, as sent or decoded
    +-- UnsupportedBody       unsupported media type or content coding
    +-- Busy                  the limit of waiting requests is reached
    +-- ChildTimedOut
    |   +-- BodyCheckTimedOut checking the body took too long
    |   +-- SolveTimedOut     the child process did not answer in time and was killed
    +-- SolverDied            the child process died

All of them pickle, since the child that solves raises some. `error_mapping.py` gives each its status.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoac.planner.units import format_bytes


class ServiceError(Exception):
    """Base of the errors of the service itself."""


class NotJson(ServiceError):
    """The body is not a JSON document."""


class Undecodable(ServiceError):
    """The body does not match its Content-Encoding."""


class MalformedRequest(ServiceError):
    """The body is JSON but not a valid request. `problems` are the first few complaints."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "not a valid request: " + "; ".join(self.problems)


class Unauthorised(ServiceError):
    """The request needs a key and has none, or an unknown one."""


class OtherHost(ServiceError):
    """A request without a key names another machine as its host: see NOTE [ Names of this machine ]."""


class Forbidden(ServiceError):
    """The key's scope does not allow this."""


class NotFound(ServiceError):
    """A profile, policy, alias, job, key or file does not exist."""


class InUse(ServiceError):
    """Something that an alias or a job still needs cannot be deleted."""


class PreconditionFailed(ServiceError):
    """The resource is not in the state that the request names."""


class PreconditionRequired(ServiceError):
    """The request must name the state of the resource that it changes."""


class KeyLimit(ServiceError):
    """A key has reached a limit of its own."""

    def __init__(self, limit: int, retry_after_s: int) -> None:
        self.limit, self.retry_after_s = limit, retry_after_s
        super().__init__(limit, retry_after_s)


class TooManyJobs(KeyLimit):
    """A key has reached its limit of queued jobs."""

    def __str__(self) -> str:
        return (
            f"this key has {self.limit} jobs in the queue, its limit; retry in {self.retry_after_s} s, "
            "or cancel a job with DELETE /v1/jobs/ID"
        )


class TooManyStreams(KeyLimit):
    """A key has reached its limit of event streams."""

    def __str__(self) -> str:
        return f"this key has {self.limit} open event streams, its limit; close one, or poll the job"


class JobCancelled(ServiceError):
    """The job of the request was cancelled."""


class JobFailed(ServiceError):
    """A job failed. `problem` is its problem document as JSON, `status` its HTTP status."""

    def __init__(self, problem: str, status: int) -> None:
        self.problem, self.status = problem, status
        super().__init__(problem, status)


class BodyTooSlow(ServiceError):
    """The body did not arrive in time."""


class BodyTooLarge(ServiceError):
    """The body has more than `limit` bytes in its `form`: "as sent" or "decoded"."""

    def __init__(self, form: str, limit: int) -> None:
        self.form, self.limit = form, limit
        super().__init__(form, limit)

    def __str__(self) -> str:
        return f"the body, {self.form}, must have at most {format_bytes(self.limit)}"


class ChildTimedOut(ServiceError):
    """A child process was killed after `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        super().__init__(limit_s)


class BodyCheckTimedOut(ChildTimedOut):
    """The child process that checked the body was killed after `limit_s` seconds."""

    def __str__(self) -> str:
        return (
            f"the body must be checked within {self.limit_s:g} s; send fewer ops, or ask a service less busy"
        )


class UnsupportedBody(ServiceError):
    """The service does not read this media type or content coding."""


class Busy(ServiceError):
    """The limit of waiting requests is reached; `retry_after_s` says when to try again."""

    def __init__(self, retry_after_s: int) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(retry_after_s)

    def __str__(self) -> str:
        return f"too many requests wait; retry in {self.retry_after_s} s"


class SolveTimedOut(ChildTimedOut):
    """The child process was killed after `limit_s` seconds, which include its start and its reading."""

    def __str__(self) -> str:
        return f"the solver gave no answer in {self.limit_s:g} s and was stopped"


class SolverDied(ServiceError):
    """The child process ended without an answer."""
