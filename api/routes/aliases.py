"""Aliases: names such as llama-8b@h100/production that move from policy to policy."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from autoac.api.routes.access import Planner, Reader, ServiceOf
from autoac.api.routes.openapi_helpers import (
    AliasName,
    body_of,
    etag,
    expected_revision,
    gives,
    json_text,
    matches,
)
from autoac.api.routes.pagination import Page, PieceOf
from autoac.api.routes.views import AliasView, MoveView
from autoac.api.storage.alias_registry import alias_history, get_alias, list_aliases, move_alias, remove_alias
from autoac.api.storage.keys import note
from autoac.api.storage.policy_registry import policy_text

router = APIRouter(prefix="/v1", tags=["aliases"])

IfMatch = Annotated[str | None, Header(description="The alias's ETag.")]
IfNoneMatch = Annotated[str | None, Header(description="* to create an alias.")]


class AliasRequest(BaseModel):
    """The body of `PUT /v1/aliases/NAME`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy_id: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@router.get("/aliases", summary="Aliases, by name")
async def get_aliases(
    service: ServiceOf,
    caller: Reader,
    piece: PieceOf,
    policy: Annotated[
        str | None, Query(pattern="^[0-9a-f]{64}$", description="Only aliases of this policy.")
    ] = None,
) -> Page[AliasView]:
    """List aliases with the policies that they name."""

    def look(connection: Connection) -> Page[AliasView]:
        found = list_aliases(connection, after=piece.after, policy=policy, limit=piece.rows)
        return piece.page(found, AliasView.of, lambda row: row.name)

    return await service.read(look)


@router.get(
    "/aliases/{name:path}",
    summary="An alias",
    responses={304: {"description": "As If-None-Match says"}},
    response_model=AliasView,
)
async def get_one_alias(
    request: Request, response: Response, name: AliasName, service: ServiceOf, caller: Reader
) -> AliasView | Response:
    """Get the policy that the alias names, and who moved it when. Use the ETag as If-Match of a move."""

    def look(connection: Connection) -> AliasView:
        return AliasView.of(get_alias(connection, name))

    found = await service.read(look)
    headers = {"ETag": etag(found.revision), "Cache-Control": "no-cache"}
    if matches(request.headers.get("if-none-match"), etag(found.revision)):
        return Response(status_code=304, headers=headers)
    response.headers.update(headers)
    return found


@router.put(
    "/aliases/{name:path}",
    summary="Point an alias at a policy",
    responses={
        201: {"model": AliasView, "description": "A new alias"},
    },
    openapi_extra=body_of("AliasRequest"),
)
async def put_alias(
    request: Request,
    response: Response,
    name: AliasName,
    service: ServiceOf,
    caller: Planner,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> AliasView:
    """Move the alias only from the revision that the request names; of two moves at once, one gets 412."""
    expected = expected_revision(if_match, if_none_match)
    body = await service.reader.small_body(request, AliasRequest)

    def move(connection: Connection) -> tuple[AliasView, bool]:
        moved, new = move_alias(connection, name, body.policy_id, caller.name, expected=expected)
        subject = f"{name} -> {body.policy_id}"
        note(connection, caller.name, "move alias", subject, request.state.request_id)
        return AliasView.of(moved), new

    moved, new = await service.write(move)
    response.status_code = 201 if new else 200
    response.headers["ETag"] = etag(moved.revision)
    return moved


@router.delete("/aliases/{name:path}", status_code=204, summary="Delete an alias")
async def delete_alias(
    request: Request, name: AliasName, service: ServiceOf, caller: Planner, if_match: IfMatch = None
) -> Response:
    """Delete the alias; its history and its policy stay."""
    expected = expected_revision(if_match, None) if if_match is not None else None

    def remove(connection: Connection) -> None:
        remove_alias(connection, name, caller.name, expected=expected)
        note(connection, caller.name, "delete alias", name, request.state.request_id)

    await service.write(remove)
    return Response(status_code=204)


@router.get("/alias-history/{name:path}", summary="The moves of an alias")
async def get_history(name: AliasName, service: ServiceOf, caller: Reader, piece: PieceOf) -> Page[MoveView]:
    """List the moves, newest first: who moved the alias, when, and to which policy."""

    def look(connection: Connection) -> Page[MoveView]:
        return piece.page(alias_history(connection, name, before=piece.before, limit=piece.rows), MoveView.of)

    return await service.read(look)


@router.get(
    "/named-policies/{name:path}",
    summary="The policy that an alias names",
    response_class=Response,
    responses={
        200: gives("Policy", "The policy, in its published form", "ETag", "Content-Location"),
        304: {"description": "As If-None-Match says"},
    },
)
async def get_named_policy(request: Request, name: AliasName, service: ServiceOf, caller: Reader) -> Response:
    """Get the policy's published form. Its id is the ETag, so a client learns cheaply that nothing moved."""

    def look(connection: Connection) -> tuple[str, bytes]:
        id = get_alias(connection, name).policy_id
        return id, policy_text(connection, id)

    id, text = await service.read(look)
    headers = {"ETag": etag(id), "Content-Location": f"/v1/policies/{id}", "Cache-Control": "no-cache"}
    if matches(request.headers.get("if-none-match"), etag(id)):
        return Response(status_code=304, headers=headers)
    return json_text(text, headers=headers)
