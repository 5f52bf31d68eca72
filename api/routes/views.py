"""The JSON of stored rows."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from sqlalchemy import Row

from autoac.api.requests import Kind
from autoac.api.storage.job_store import Job, JobState

JsonText = BeforeValidator(lambda text: text if text is None else json.loads(text))
"""Reads a field whose column has JSON."""


class View(BaseModel):
    """Base class of the JSON objects that the service returns. Times are those of the database, as UTC."""

    model_config = ConfigDict(frozen=True)

    @classmethod
    def of(cls, row: Any, **more: Any) -> Self:
        """Return the view of a stored row; `more` has the fields that the row lacks."""
        return cls(**{name: getattr(row, name) for name in cls.model_fields if name not in more} | more)


class ProfileView(View):
    """A stored profile, without its content."""

    digest: str
    model: str
    fingerprint: str
    device: str
    ops: int
    inputs: Annotated[list[str], JsonText] = Field(description='Of the profiled step: "int64[8, 1024]".')
    parameter_bytes: int
    plain_bytes: int = Field(description="Size of the published form.")
    created_at: datetime
    created_by: str
    url: str

    @classmethod
    def of(cls, row: Row[Any], **more: Any) -> Self:
        return super().of(row, digest=row.id, url=f"/v1/profiles/{row.id}", **more)


class PolicyView(View):
    """A stored policy, without its decisions. Bytes and microseconds."""

    id: str
    model: str
    fingerprint: str
    device: str
    budget_bytes: int
    profile_digest: str
    peak_bytes: int
    recompute_us: float
    step_us: float
    gap: float
    stopped: str
    created_at: datetime
    created_by: str
    url: str

    @classmethod
    def of(cls, row: Row[Any], **more: Any) -> Self:
        return super().of(row, url=f"/v1/policies/{row.id}", **more)


class ProgressView(View):
    """The progress of a solve. Microseconds of recompute, or bytes of peak for a floor."""

    incumbent: float | None = Field(description="The best plan so far; null before the first.")
    bound: float | None = Field(description="Proven: no plan is better.")
    gap: float | None
    seconds: float | None
    point: int = Field(0, description="Of a frontier: the current plan, from 1; 0 before the first.")
    points: int = Field(0, description="Of a frontier: the number of plans.")


class JobView(View):
    """A job as clients see it: the request, its state and where its result is."""

    id: str
    kind: Kind
    state: JobState
    profile_digest: str
    options: dict[str, Any]
    owner: str
    attempt: int = Field(description="Number of times that it was started.")
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    progress: ProgressView | None
    policy_id: str | None
    problem: Annotated[dict[str, Any] | None, JsonText] = Field(
        description="Of a failed job: the problem document."
    )
    url: str
    events_url: str
    result_url: str

    @classmethod
    def of(cls, row: Job, progress: dict[str, Any] | None = None, **more: Any) -> Self:
        url = f"/v1/jobs/{row.id}"
        urls = {"url": url, "events_url": f"{url}/events", "result_url": f"{url}/result"}
        return super().of(row, progress=progress, **urls, **more)
