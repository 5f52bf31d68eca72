"""Models: their names and small frontiers. A model is all profiles of one fingerprint."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any

import zstandard
from fastapi import APIRouter, Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from sqlalchemy import Connection

from autoac.api.errors import MalformedRequest
from autoac.api.routes.access import Planner, Reader, ServiceOf
from autoac.api.routes.openapi_helpers import Digest, body_of
from autoac.api.routes.pagination import Page, PieceOf
from autoac.api.routes.views import JsonText, View
from autoac.api.service import Service
from autoac.api.storage.keys import Caller, note
from autoac.api.storage.profile_registry import get_model, list_models, name_model

router = APIRouter(prefix="/v1/models", tags=["models"])


def _plans(frontier: bytes | None) -> Any:
    return None if frontier is None else json.loads(zstandard.decompress(frontier))["plans"]


class PointView(BaseModel):
    """A plan of a small frontier."""

    peak_bytes: int
    recompute_us: float
    step_us: float


class ModelView(View):
    """A model: all profiles of one fingerprint."""

    fingerprint: str
    model: str = Field(description="The name of the class.")
    inputs: Annotated[list[str], JsonText] = Field(description='Of the profiled step: "int64[8, 1024]".')
    parameter_bytes: int
    name: str | None = Field(description="The name that a person gave it, or null.")
    named_by: str | None
    named_at: datetime | None
    frontier: Annotated[list[PointView] | None, BeforeValidator(_plans)] = Field(
        description="The newest frontier, by peak."
    )
    frontier_job: str | None = Field(description="Id of the job that computed it.")


class NameRequest(BaseModel):
    """The body of `PUT /v1/models/FINGERPRINT/name`."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=100)]


@router.get("", summary="Models, newest first")
async def get_models(service: ServiceOf, caller: Reader, piece: PieceOf) -> Page[ModelView]:
    """List the models that have a profile."""

    def look(connection: Connection) -> Page[ModelView]:
        found = list_models(connection, before=piece.before, limit=piece.rows)
        return piece.page(found, ModelView.of)

    return await service.read(look)


@router.get("/{fingerprint}", summary="A model")
async def get_one_model(fingerprint: Digest, service: ServiceOf, caller: Reader) -> ModelView:
    """Get a model's name and its small frontier."""

    return await service.read(lambda connection: ModelView.of(get_model(connection, fingerprint)))


@router.put(
    "/{fingerprint}/name",
    summary="Name a model",
    openapi_extra=body_of("NameRequest"),
)
async def put_name(fingerprint: Digest, request: Request, service: ServiceOf, caller: Planner) -> ModelView:
    """Set a name for people, such as `llama-70b, 8k tokens`. Nothing else uses it."""
    name = (await service.reader.small_body(request, NameRequest)).name.strip()
    if not name or not name.isprintable():
        raise MalformedRequest(["body.name: must be printable text that is not blank"])
    return await _named(service, fingerprint, name, caller, request)


@router.delete("/{fingerprint}/name", summary="Delete a model's name")
async def delete_name(
    fingerprint: Digest, request: Request, service: ServiceOf, caller: Planner
) -> ModelView:
    """Delete the name; the pages show the class again."""
    return await _named(service, fingerprint, None, caller, request)


async def _named(
    service: Service, fingerprint: str, name: str | None, caller: Caller, request: Request
) -> ModelView:
    def write(connection: Connection) -> ModelView:
        found = name_model(connection, fingerprint, name, caller.name)
        note(connection, caller.name, "name model", fingerprint, request.state.request_id)
        return ModelView.of(found)

    return await service.write(write)
