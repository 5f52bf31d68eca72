"""Profiles, by their content: the same profile always has the same digest."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from sqlalchemy import Connection

from autoac.api.requests import Kind
from autoac.api.routes.access import Planner, Reader, ServiceOf
from autoac.api.routes.documents import add_routes
from autoac.api.routes.openapi_helpers import Text, body_of
from autoac.api.routes.pagination import Page, PieceOf
from autoac.api.routes.views import ProfileView
from autoac.api.storage.job_store import delete_profile
from autoac.api.storage.records import add_profile, get_row, list_rows
from autoac.api.storage.tables import profiles

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

    def store(connection: Connection) -> tuple[bool, ProfileView]:
        new = add_profile(connection, profile, caller.name)
        return new, ProfileView.of(get_row(connection, profiles, profile.digest))

    new, view = await service.write(store)
    response.status_code = 201 if new else 200
    response.headers["Location"] = view.url
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
    wanted = {"model": model, "fingerprint": fingerprint, "device": device}

    def look(connection: Connection) -> Page[ProfileView]:
        found = list_rows(connection, profiles, wanted, before=piece.before, limit=piece.rows)
        return piece.page(found, ProfileView.of)

    return await service.read(look)


add_routes(router, profiles, "Profile", ProfileView, delete_profile)
