"""Errors as clients see them: RFC 9457 problem documents."""

from __future__ import annotations

from typing import Any, Literal

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

MEDIA_TYPE = "application/problem+json"
URN = "urn:autoac:problem:"
REF = "#/components/schemas/{model}"


class Problem(BaseModel):
    """A problem document. `type` identifies the kind of problem and does not change between releases."""

    model_config = ConfigDict(frozen=True)

    type: str = Field(examples=[URN + "not-json", "about:blank"])
    title: str
    status: int
    detail: str


class InvalidProblem(Problem):
    """The body is not valid; `problems` has the first few complaints."""

    problems: list[str]


class VersionProblem(Problem):
    """The service does not read this version of a format."""

    format: str
    known: int


class LimitProblem(Problem):
    """The body is larger than the limit."""

    limit_bytes: int


class QueueProblem(Problem):
    """The key has reached its limit of queued jobs or event streams."""

    limit: int


class OutOfTimeProblem(Problem):
    """A limit on work or time was reached before any plan was found. Bytes as in InfeasibleProblem."""

    time_limit_s: float
    proven_floor_bytes: int | None = None
    smallest_found_bytes: int | None = None


class Held(BaseModel):
    """Bytes that are live at a peak."""

    nbytes: int
    name: str
    why: str


class InfeasibleProblem(Problem):
    """No plan fits in the budget. All sizes in bytes."""

    budget_bytes: int
    proven_floor_bytes: int  # no plan has a smaller peak
    smallest_found_bytes: int | None  # the smallest peak of any plan found
    peak_at: str
    live: list[Held]  # at that peak, largest first


class InfeasibleConstraintsProblem(InfeasibleProblem):
    """No plan fits in the budget under the constraints."""

    culprits: list[str]  # a line for each constraint to blame


MODELS = (
    Problem,
    InvalidProblem,
    VersionProblem,
    LimitProblem,
    QueueProblem,
    OutOfTimeProblem,
    InfeasibleProblem,
    InfeasibleConstraintsProblem,
)


class ProblemResponse(JSONResponse):
    """The response that carries a problem, with its status."""

    media_type = MEDIA_TYPE

    def __init__(self, problem: Problem, headers: dict[str, str] | None = None) -> None:
        super().__init__(problem.model_dump(mode="json"), problem.status, headers)


def schemas(*models: type[BaseModel], serialized: tuple[type[BaseModel], ...] = ()) -> dict[str, Any]:
    """Return JSON schemas for OpenAPI's components: of problems and `models` as they are read, and of
    `serialized` as they are written."""
    kinds: tuple[type[BaseModel], ...] = (*MODELS, *models)
    read: list[tuple[type[BaseModel], Literal["validation"]]] = [(m, "validation") for m in kinds]
    written: list[tuple[type[BaseModel], Literal["serialization"]]] = [
        (m, "serialization") for m in serialized
    ]
    _, definitions = models_json_schema([*read, *written], ref_template=REF)
    return dict(definitions["$defs"])
