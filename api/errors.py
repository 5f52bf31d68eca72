"""What can go wrong with a request, beside what can go wrong in the planner.

    ServiceError
    +-- NotJson               the body is no JSON document
    +-- Undecodable           the body is not what its Content-Encoding says
    +-- MalformedRequest      it is JSON, and no request for a policy
    +-- Unauthorised          no key, or one that is not known
    +-- Forbidden             the key's scope does not reach so far
    +-- OtherHost             asked without a key under a name that is not this machine's
    +-- NotFound              no profile, policy, alias or job of that name
    +-- InUse                 it cannot be deleted: an alias or a job names it
    +-- PreconditionFailed    If-Match or If-None-Match does not hold: somebody was faster
    +-- PreconditionRequired  an alias moves only under one of the two
    +-- TooManyJobs           this key has as many jobs in the queue as it may
    +-- TooManyStreams        this key listens to as many jobs as it may
    +-- JobCancelled          the job that was waited for was cancelled
    +-- JobFailed             it failed; carries the problem document
    +-- BodyTooSlow           the body took too long to arrive
    +-- BodyTooLarge          more bytes than the service takes, as sent or decoded
    +-- UnsupportedBody       another media type or content coding
    +-- Busy                  as many requests as the service takes are waiting
    +-- SolveTimedOut         the child did not answer in time and was killed
    +-- SolverDied            the child ended without an answer; says how

Some are raised in the child that solves, and pickle. `app.py` says which status each becomes.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoac.planner.units import format_bytes


class ServiceError(Exception):
    """Base of the errors of the service itself."""


class NotJson(ServiceError):
    """The body is no JSON document."""


class Undecodable(ServiceError):
    """The body is not what its Content-Encoding says."""


class MalformedRequest(ServiceError):
    """The body is JSON and no request. `problems` has a line for each thing found, the first few."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "not a valid request: " + "; ".join(self.problems)


class Unauthorised(ServiceError):
    """The service wants a key, and the request has none or one that is not known."""


class OtherHost(ServiceError):
    """Asked without a key under a name that is not this machine's own: see NOTE [ Names of this machine ]."""


class Forbidden(ServiceError):
    """The key's scope does not reach so far."""


class NotFound(ServiceError):
    """There is no such thing; the message says of which kind."""


class InUse(ServiceError):
    """It cannot be deleted, since something else names it."""


class PreconditionFailed(ServiceError):
    """The state is not the one that the request was made for."""


class PreconditionRequired(ServiceError):
    """The request has to say which state it was made for."""


class TooManyJobs(ServiceError):
    """A key has `limit` jobs in the queue, and may have no more."""

    def __init__(self, limit: int, retry_after_s: int) -> None:
        self.limit, self.retry_after_s = limit, retry_after_s
        super().__init__(limit, retry_after_s)

    def __str__(self) -> str:
        return (
            f"this key has {self.limit} jobs in the queue, which is its limit; ask again in "
            f"{self.retry_after_s} s, or cancel one with DELETE /v1/jobs/ID"
        )


class TooManyStreams(ServiceError):
    """A key listens to `limit` jobs at once, and may not listen to more."""

    def __init__(self, limit: int, retry_after_s: int) -> None:
        self.limit, self.retry_after_s = limit, retry_after_s
        super().__init__(limit, retry_after_s)

    def __str__(self) -> str:
        return (
            f"this key listens to {self.limit} jobs, which is its limit; close a stream, or ask for the job"
        )


class JobCancelled(ServiceError):
    """A job that was waited for was cancelled."""


class JobFailed(ServiceError):
    """A job failed. `problem` is the document that says how, as JSON; `status` its HTTP status."""

    def __init__(self, problem: str, status: int) -> None:
        self.problem, self.status = problem, status
        super().__init__(problem, status)


class BodyTooSlow(ServiceError):
    """The body was not there within the time for it."""


class BodyTooLarge(ServiceError):
    """The body has more than `limit` bytes; `form` says in which form: "as sent" or "decoded"."""

    def __init__(self, form: str, limit: int) -> None:
        self.form, self.limit = form, limit
        super().__init__(form, limit)

    def __str__(self) -> str:
        return f"the body, {self.form}, has more than the {format_bytes(self.limit)} that this service takes"


class UnsupportedBody(ServiceError):
    """A media type or a content coding that the service does not read."""


class Busy(ServiceError):
    """No room for another request; `retry_after_s` is when to ask again."""

    def __init__(self, retry_after_s: int) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(retry_after_s)

    def __str__(self) -> str:
        return f"as many requests as this service takes are waiting; ask again in {self.retry_after_s} s"


class SolveTimedOut(ServiceError):
    """The child did not answer within `limit_s` seconds, start and reading included, and was killed."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        super().__init__(limit_s)

    def __str__(self) -> str:
        return f"the solver gave no answer in {self.limit_s:g} s and was stopped"


class SolverDied(ServiceError):
    """The child ended without an answer."""
