"""Policies: found by fingerprint, device, budget and options; drawn and compared when somebody asks."""

from __future__ import annotations

import gzip
from contextlib import suppress
from functools import partial
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Request, Response
from sqlalchemy import Connection

from autoac.api.errors import MalformedRequest, NotFound
from autoac.api.policy_report import pair
from autoac.api.routes.access import Reader, ServiceOf
from autoac.api.routes.documents import add_routes
from autoac.api.routes.openapi_helpers import Digest, Text, gives, json_text
from autoac.api.routes.pagination import Page, PieceOf
from autoac.api.routes.views import PolicyView
from autoac.api.storage.records import PolicyOptions, delete_row, get_row, get_text, list_rows
from autoac.api.storage.tables import policies, profiles
from autoac.planner.formats.base import MAX_INT
from autoac.planner.plan import DEFAULT_GAP, DEFAULT_TIME_LIMIT_S
from autoac.planner.units import GIB, bytes_from_gb

router = APIRouter(prefix="/v1/policies", tags=["policies"])
comparing = APIRouter(prefix="/v1", tags=["policies"])

Id = Annotated[str, Query(pattern="^[0-9a-f]{64}$", description="Id of a policy.")]


async def _options(
    service: ServiceOf,
    gap: Annotated[float | None, Query(ge=0, le=1, allow_inf_nan=False)] = None,
    time_limit_s: Annotated[float | None, Query(gt=0, allow_inf_nan=False)] = None,
    constraints_digest: Annotated[str | None, Query(pattern="^([0-9a-f]{64})?$")] = None,
) -> PolicyOptions | None:
    if (gap, time_limit_s, constraints_digest) == (None, None, None):
        return None
    return PolicyOptions(
        gap=DEFAULT_GAP if gap is None else gap,
        time_limit_s=min(time_limit_s or DEFAULT_TIME_LIMIT_S, service.settings.solve_time_limit_s),
        constraints_digest=constraints_digest or "",
    )


async def _budget(
    budget_gb: Annotated[float | None, Query(gt=0, le=MAX_INT / GIB, allow_inf_nan=False)] = None,
    budget_bytes: Annotated[int | None, Query(gt=0, le=MAX_INT)] = None,
) -> int | None:
    if budget_gb is not None and budget_bytes is not None:
        raise MalformedRequest(["query.budget_gb: give at most one of budget_gb and budget_bytes"])
    return bytes_from_gb(budget_gb) if budget_gb is not None else budget_bytes


@router.get("", summary="Policies, newest first", response_model=Page[PolicyView])
async def get_policies(
    service: ServiceOf,
    caller: Reader,
    piece: PieceOf,
    budget: Annotated[int | None, Depends(_budget)],
    options: Annotated[PolicyOptions | None, Depends(_options)],
    model: Text = None,
    fingerprint: Text = None,
    device: Text = None,
    profile: Annotated[str | None, Query(pattern="^[0-9a-f]{64}$", description="Its digest.")] = None,
) -> Response:
    """List policies without their decisions; `url` of each has the policy itself.

    With a gap, time limit or constraints, list only policies that answer a solve under these.
    Options that are not given have the defaults of a solve. `constraints_digest` is the SHA-256 of the
    constraints' JSON with sorted keys, or empty without constraints.
    """
    wanted = {"model": model, "fingerprint": fingerprint, "device": device}
    wanted_of = wanted | {"profile_digest": profile, "budget_bytes": budget}

    def look(connection: Connection) -> str:
        found = list_rows(connection, policies, wanted_of, options, before=piece.before, limit=piece.rows)
        return piece.page(found, PolicyView.of).model_dump_json()

    few = fingerprint is not None and budget is not None
    return json_text(await (service.read_on_loop(look) if few else service.read(look)))


add_routes(
    router, policies, "Policy", PolicyView, lambda connection, id: delete_row(connection, policies, id)
)


@router.get(
    "/{id}/drawing",
    summary="The plot of a policy",
    response_class=Response,
    responses={
        200: {
            "description": "Memory over the step, compared with nothing and every block recomputed",
            "content": {"application/json": {"schema": {"type": "object"}}},
        },
    },
)
async def get_drawing(request: Request, id: Digest, service: ServiceOf, caller: Reader) -> Response:
    """Plot a policy: the data that this release's pages draw. Its members may change with each release."""
    drawn = await service.reader.report(request, "draw", partial(_read_pair, service, id, undrawn=False))
    headers = {"Cache-Control": "private, max-age=3600", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return json_text(drawn, headers=headers | {"Content-Encoding": "gzip"})
    return json_text(await to_thread.run_sync(gzip.decompress, drawn), headers=headers)


@comparing.get(
    "/differences",
    summary="What two policies decide otherwise",
    response_class=Response,
    responses={200: gives("DifferenceView", "The difference")},
)
async def get_difference(
    request: Request, service: ServiceOf, caller: Reader, before: Id, after: Id
) -> Response:
    """Compare two policies by what each really holds.

    If the profile of one was deleted, the decisions of both are compared.
    """

    def look() -> bytes:
        return b"[" + b", ".join(_read_pair(service, id, undrawn=True) for id in (before, after)) + b"]"

    return json_text(await service.reader.report(request, "compare", look))


def _read_pair(service: ServiceOf, id: str, *, undrawn: bool) -> bytes:
    """Return a policy with its profile for a child process; `undrawn`: also if its profile was deleted."""
    with service.database.read() as connection:
        policy = get_text(connection, policies, id)
        digest, profile = get_row(connection, policies, id).profile_digest, None
        with suppress(*(NotFound,) if undrawn else ()):
            profile = get_text(connection, profiles, digest)
    return pair(profile, policy)
