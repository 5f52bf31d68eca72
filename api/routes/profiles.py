"""Profiles: kept by their content. The same profile has the same digest, whoever sends it how often."""

from __future__ import annotations

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from sqlalchemy.exc import IntegrityError

from autoac.api.errors import MalformedRequest
from autoac.api.problems import InvalidProblem, Problem, VersionProblem
from autoac.api.requests import Kind, ParsedProfile
from autoac.api.routes.access import Admin, Planner, Reader, ServiceOf
from autoac.api.routes.openapi_helpers import (
    BODY,
    GONE,
    Digest,
    Text,
    body_of,
    etag,
    gives,
    json_text,
    matches,
    problems,
    refuse_nul,
)
from autoac.api.routes.pagination import Page, PieceOf
from autoac.api.routes.views import ProfileView
from autoac.api.service import Service
from autoac.api.storage.job_store import delete_profile
from autoac.api.storage.keys import Caller, note
from autoac.api.storage.registry import add_profile, get_profile, list_profiles, profile_text

router = APIRouter(prefix="/v1/profiles", tags=["profiles"])

TAKES = problems(
    BODY,
    {
        422: ("Malformed, of another version, or of another digest", (VersionProblem, InvalidProblem)),
        500: ("The child that reads profiles died, or the service failed", (Problem,)),
        503: ("Too many requests wait, or the database is away", (Problem,)),
        504: ("The profile took too long to check", (Problem,)),
    },
)


@router.post(
    "",
    status_code=201,
    summary="Keep a profile",
    responses={200: {"model": ProfileView, "description": "It was there already"}, **TAKES},
    openapi_extra=body_of("Profile"),
)
async def post_profile(
    request: Request, response: Response, service: ServiceOf, caller: Planner
) -> ProfileView:
    """201 for a new one, 200 for one that was there; the same content has the same digest."""
    taken = await service.reader.parse_request(request, Kind.PROFILE)
    assert taken.profile is not None
    return await _keep(service, taken.profile, caller, request, response)


@router.put(
    "/{digest}",
    status_code=201,
    summary="Keep a profile whose digest is known",
    responses={200: {"model": ProfileView, "description": "It was there already"}, **TAKES},
    openapi_extra=body_of("Profile"),
)
async def put_profile(
    digest: Digest, request: Request, response: Response, service: ServiceOf, caller: Planner
) -> ProfileView:
    """As POST, and refuses a body of another digest."""
    taken = await service.reader.parse_request(request, Kind.PROFILE)
    assert taken.profile is not None
    if taken.profile_digest != digest:
        raise MalformedRequest([f"path.digest: the body's is {taken.profile_digest}"])
    return await _keep(service, taken.profile, caller, request, response)


async def _keep(
    service: Service, taken: ParsedProfile, caller: Caller, request: Request, response: Response
) -> ProfileView:
    def keep() -> tuple[bool, ProfileView]:
        try:
            with service.database.write() as connection:
                new = add_profile(connection, taken, caller.name)
                if new:
                    id = request.state.request_id
                    note(connection, caller.name, "store profile", taken.digest, id)
                return new, ProfileView.of(get_profile(connection, taken.digest))
        except IntegrityError:  # somebody else stored it between the two statements
            with service.database.read() as connection:
                return False, ProfileView.of(get_profile(connection, taken.digest))

    new, view = await to_thread.run_sync(keep)
    response.status_code = 201 if new else 200
    response.headers["Location"] = f"/v1/profiles/{taken.digest}"
    return view


@router.get("", summary="Profiles, newest first", responses=problems())
async def get_profiles(
    service: ServiceOf,
    caller: Reader,
    piece: PieceOf,
    model: Text = None,
    fingerprint: Text = None,
    device: Text = None,
) -> Page[ProfileView]:
    """Without their content."""
    refuse_nul(model=model, fingerprint=fingerprint, device=device)

    def look() -> Page[ProfileView]:
        with service.database.read() as connection:
            found = list_profiles(
                connection,
                model=model,
                fingerprint=fingerprint,
                device=device,
                before=piece.before,
                limit=piece.rows,
            )
        return piece.page(found, ProfileView.of)

    return await to_thread.run_sync(look)


@router.head(
    "/{digest}", summary="Whether a profile is here", response_class=Response, responses=problems(GONE)
)
@router.get(
    "/{digest}",
    summary="A profile",
    response_class=Response,
    responses={
        200: gives("Profile", "The profile, in its published form", "ETag"),
        304: {"description": "As If-None-Match says"},
        **problems(GONE),
    },
)
async def get_one_profile(request: Request, digest: Digest, service: ServiceOf, caller: Reader) -> Response:
    """Its published form. With HEAD, whether it is here, so that it need not be sent again."""
    headers = {"ETag": etag(digest), "Cache-Control": "private, max-age=31536000, immutable"}
    known = request.method == "HEAD" or matches(request.headers.get("if-none-match"), etag(digest))

    def look() -> bytes:
        with service.database.read() as connection:
            if known:
                get_profile(connection, digest)
                return b""
            return profile_text(connection, digest)

    text = await to_thread.run_sync(look)
    if known:
        return Response(status_code=200 if request.method == "HEAD" else 304, headers=headers)
    return json_text(text, headers=headers)


@router.delete(
    "/{digest}",
    status_code=204,
    summary="Forget a profile",
    responses=problems(GONE, {409: ("A job needs it", (Problem,))}),
)
async def delete_one_profile(request: Request, digest: Digest, service: ServiceOf, caller: Admin) -> Response:
    """Its finished jobs are forgotten with it; its policies stay."""

    def forget() -> None:
        with service.database.write() as connection:
            delete_profile(connection, digest)
            note(connection, caller.name, "delete profile", digest, request.state.request_id)

    await to_thread.run_sync(forget)
    return Response(status_code=204)
