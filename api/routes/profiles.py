"""Profiles, by their content: the same profile always has the same digest."""

from __future__ import annotations

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from autoac.api.requests import Kind
from autoac.api.routes.access import Admin, Planner, Reader, ServiceOf
from autoac.api.routes.openapi_helpers import (
    Digest,
    Text,
    body_of,
    etag,
    gives,
    json_text,
    matches,
)
from autoac.api.routes.pagination import Page, PieceOf
from autoac.api.routes.views import ProfileView
from autoac.api.storage.job_store import delete_profile
from autoac.api.storage.keys import note
from autoac.api.storage.profile_registry import add_profile, get_profile, list_profiles, profile_text

router = APIRouter(prefix="/v1/profiles", tags=["profiles"])


@router.post(
    "",
    status_code=201,
    summary="Store a profile",
    responses={200: {"model": ProfileView, "description": "The profile was stored already"}},
    openapi_extra=body_of("Profile"),
)
async def post_profile(
    request: Request, response: Response, service: ServiceOf, caller: Planner
) -> ProfileView:
    """Answer 201 for a new profile, 200 for a stored one. The same content has the same digest."""
    profile = (await service.reader.parse_request(request, Kind.PROFILE)).profile
    assert profile is not None

    def store() -> tuple[bool, ProfileView]:
        try:
            with service.database.write() as connection:
                new = add_profile(connection, profile, caller.name)
                if new:
                    id = request.state.request_id
                    note(connection, caller.name, "store profile", profile.digest, id)
                return new, ProfileView.of(get_profile(connection, profile.digest))
        except IntegrityError:  # another request stored it between the two statements
            with service.database.read() as connection:
                return False, ProfileView.of(get_profile(connection, profile.digest))

    new, view = await to_thread.run_sync(store)
    response.status_code = 201 if new else 200
    response.headers["Location"] = f"/v1/profiles/{profile.digest}"
    return view


@router.get("", summary="Profiles, newest first")
async def get_profiles(
    service: ServiceOf,
    caller: Reader,
    piece: PieceOf,
    model: Text = None,
    fingerprint: Text = None,
    device: Text = None,
) -> Page[ProfileView]:
    """List profiles without their content."""

    def look(connection: Connection) -> Page[ProfileView]:
        wanted = {"model": model, "fingerprint": fingerprint, "device": device}
        found = list_profiles(connection, wanted, before=piece.before, limit=piece.rows)
        return piece.page(found, ProfileView.of)

    return await service.read(look)


@router.get(
    "/{digest}",
    summary="A profile",
    response_class=Response,
    responses={
        200: gives("Profile", "The profile, in its published form", "ETag"),
        304: {"description": "As If-None-Match says"},
    },
)
async def get_one_profile(request: Request, digest: Digest, service: ServiceOf, caller: Reader) -> Response:
    """Get the published form. With HEAD, learn that the profile exists, so that it need not be sent again."""
    headers = {"ETag": etag(digest), "Cache-Control": "private, max-age=31536000, immutable"}
    known = matches(request.headers.get("if-none-match"), etag(digest))

    def look(connection: Connection) -> bytes:
        if known:
            get_profile(connection, digest)
            return b""
        return profile_text(connection, digest)

    text = await service.read(look)
    if known:
        return Response(status_code=304, headers=headers)
    return json_text(text, headers=headers)


@router.delete(
    "/{digest}",
    status_code=204,
    summary="Delete a profile",
)
async def delete_one_profile(request: Request, digest: Digest, service: ServiceOf, caller: Admin) -> Response:
    """Delete a profile and its finished jobs; its policies stay."""

    def forget(connection: Connection) -> None:
        delete_profile(connection, digest)
        note(connection, caller.name, "delete profile", digest, request.state.request_id)

    await service.write(forget)
    return Response(status_code=204)
