"""Errors as clients see them: RFC 9457 problem documents."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

MEDIA_TYPE = "application/problem+json"
URN = "urn:autoac:problem:"
REF = "#/components/schemas/{model}"


class Held(BaseModel):
    """Bytes that are live at a peak."""

    nbytes: int
    name: str
    why: str


class Problem(BaseModel):
    """A problem document. `type` identifies the kind of problem; other members depend on it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: str = Field(examples=[URN + "not-json", "about:blank"])
    title: str
    status: int
    detail: str
    problems: list[str] = Field(
        default=[], description="Of a body that is not valid: the first few complaints."
    )
    format: str = Field(default="", description="Of an unknown version: the format.")
    known: int = Field(default=0, description="The version of it that the service reads.")
    limit_bytes: int = Field(default=0, description="Of a body that is too large.")
    limit: int = Field(default=0, description="Of queued jobs or event streams of the key.")
    time_limit_s: float = Field(default=0, description="What a solve or a check took longer than.")
    budget_bytes: int = Field(default=0, description="The budget in which no plan fits.")
    proven_floor_bytes: int | None = Field(default=None, description="No plan has a smaller peak.")
    smallest_found_bytes: int | None = Field(default=None, description="The smallest peak of any plan found.")
    peak_at: str = Field(default="", description="Where that peak is.")
    live: list[Held] = Field(default=[], description="What is live there, largest first.")
    constraints: list[str] = Field(default=[], description="A line for each kind that takes part.")

    def to_json(self) -> str:
        """Return the document with the members that its kind has."""
        return self.model_dump_json(exclude_unset=True)


def schemas(*models: type[BaseModel], serialized: tuple[type[BaseModel], ...] = ()) -> dict[str, Any]:
    """Return JSON schemas for OpenAPI's components: of the problem and `models` as they are read, and of
    `serialized` as they are written."""
    kinds: tuple[type[BaseModel], ...] = (Problem, *models)
    read: list[tuple[type[BaseModel], Literal["validation"]]] = [(m, "validation") for m in kinds]
    written: list[tuple[type[BaseModel], Literal["serialization"]]] = [
        (m, "serialization") for m in serialized
    ]
    _, definitions = models_json_schema([*read, *written], ref_template=REF)
    return dict(definitions["$defs"])
