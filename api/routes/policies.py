"""Policies, by version for each fingerprint and budget."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel
from sqlalchemy import Connection

from autoac.api.errors import MalformedRequest, NotFound, SolverDied, SolveTimedOut
from autoac.api.policy_plot import became
from autoac.api.routes.access import Admin, Reader, ServiceOf
from autoac.api.routes.openapi_helpers import (
    NO_NUL,
    Digest,
    Text,
    etag,
    gives,
    gzipped,
    json_text,
    matches,
)
from autoac.api.routes.pagination import Page, PieceOf
from autoac.api.routes.views import PolicyView
from autoac.api.service import Service
from autoac.api.storage.alias_registry import get_alias
from autoac.api.storage.keys import note
from autoac.api.storage.plot_cache import plot_version, read_plot
from autoac.api.storage.policy_registry import (
    PolicyFilter,
    PolicyOptions,
    delete_policy,
    get_policy,
    list_policies,
    policy_text,
)
from autoac.planner.errors import PlannerError
from autoac.planner.formats.base import MAX_INT
from autoac.planner.formats.policy import Policy
from autoac.planner.plan import DEFAULT_GAP, DEFAULT_TIME_LIMIT_S
from autoac.planner.report.compare import DecisionChange, Side, difference, difference_in_words
from autoac.planner.units import GIB, bytes_from_gb

router = APIRouter(prefix="/v1", tags=["policies"])

Name = Annotated[str, Query(max_length=200, pattern=NO_NUL, description="Id of a policy, or an alias.")]


class DifferenceView(BaseModel):
    """Compares two policies: what they decide otherwise."""

    before_id: str
    after_id: str
    same: bool
    before: Side
    after: Side
    changes: list[DecisionChange]
    only_before: list[str]  # ops missing in the second
    only_after: list[str]
    words: str  # the same as text


async def _options(
    service: ServiceOf,
    headroom_bytes: Annotated[int | None, Query(ge=0, le=MAX_INT)] = None,
    gap: Annotated[float | None, Query(ge=0, le=1, allow_inf_nan=False)] = None,
    time_limit_s: Annotated[float | None, Query(gt=0, allow_inf_nan=False)] = None,
    constraints_digest: Annotated[str | None, Query(pattern="^([0-9a-f]{64})?$")] = None,
) -> PolicyOptions | None:
    if (headroom_bytes, gap, time_limit_s, constraints_digest) == (None, None, None, None):
        return None
    return PolicyOptions(
        headroom_bytes=headroom_bytes or 0,
        gap=DEFAULT_GAP if gap is None else gap,
        time_limit_s=min(time_limit_s or DEFAULT_TIME_LIMIT_S, service.settings.solve_time_limit_s),
        constraints_digest=constraints_digest or "",
    )


async def _filter(
    options: Annotated[PolicyOptions | None, Depends(_options)],
    model: Text = None,
    fingerprint: Text = None,
    device: Text = None,
    budget_gb: Annotated[float | None, Query(gt=0, le=MAX_INT / GIB, allow_inf_nan=False)] = None,
    budget_bytes: Annotated[int | None, Query(gt=0, le=MAX_INT)] = None,
) -> PolicyFilter:
    if budget_gb is not None and budget_bytes is not None:
        raise MalformedRequest(["query.budget_gb: give at most one of budget_gb and budget_bytes"])
    budget = bytes_from_gb(budget_gb) if budget_gb is not None else budget_bytes
    return PolicyFilter(model, fingerprint, device, budget, options)


FilterOf = Annotated[PolicyFilter, Depends(_filter)]


@router.get(
    "/policies",
    summary="Policies, newest first",
    response_model=Page[PolicyView],
)
async def get_policies(
    service: ServiceOf,
    caller: Reader,
    piece: PieceOf,
    wanted: FilterOf,
) -> Response:
    """List policies without their decisions; `url` of each has the policy itself.

    With a headroom, gap, time limit or constraints, list only policies that answer a solve under these.
    Options that are not given have the defaults of a solve. `constraints_digest` is the SHA-256 of the
    constraints' JSON with sorted keys, or empty without constraints.
    """

    def look(connection: Connection) -> str:
        found = list_policies(connection, wanted, before=piece.before, limit=piece.rows)
        return piece.page(found, PolicyView.of).model_dump_json()

    few = wanted.fingerprint is not None and wanted.budget_bytes is not None
    return json_text(await (service.read_on_loop(look) if few else service.read(look)))


@router.get(
    "/policies/{id}",
    summary="A policy",
    response_class=Response,
    responses={
        200: gives("Policy", "The policy, in its published form", "ETag"),
        304: {"description": "As If-None-Match says"},
    },
)
async def get_one_policy(request: Request, id: Digest, service: ServiceOf, caller: Reader) -> Response:
    """Get the published form. It never changes, so the id is the ETag."""
    headers = {"ETag": etag(id), "Cache-Control": "private, max-age=31536000, immutable"}

    text = service.texts.get(id)
    if text is None:
        text = await service.read(lambda connection: policy_text(connection, id))
        with suppress(ValueError):  # larger than the cache
            service.texts[id] = text
    if matches(request.headers.get("if-none-match"), etag(id)):
        return Response(status_code=304, headers=headers)
    return json_text(text, headers=headers)


@router.get("/policies/{id}/about", summary="Facts about a policy")
async def get_about(id: Digest, service: ServiceOf, caller: Reader) -> PolicyView:
    """Get a policy's version, its predictions, and who requested it when."""

    return await service.read(lambda connection: PolicyView.of(get_policy(connection, id)))


@router.get(
    "/policies/{id}/drawing",
    summary="The plot of a policy",
    response_class=Response,
    responses={
        200: {
            "description": "Memory over the step, compared with nothing and every block recomputed, "
            "and the decision on each op",
            "headers": {"ETag": {"schema": {"type": "string"}}},
            "content": {"application/json": {"schema": {"type": "object"}}},
        },
        304: {"description": "As If-None-Match says"},
    },
)
async def get_drawing(request: Request, id: Digest, service: ServiceOf, caller: Reader) -> Response:
    """Get the data that this release's pages draw. Its members may change with each release."""

    tag = etag(f"{id}-{plot_version()[:16]}")
    # Weak, since the same plot is sent with and without gzip.
    headers = {"ETag": f"W/{tag}", "Cache-Control": "private, no-cache", "Vary": "Accept-Encoding"}
    known = matches(request.headers.get("if-none-match"), tag)

    def look(connection: Connection) -> bytes | None:
        get_policy(connection, id)
        return None if known else read_plot(connection, id)

    drawn = await service.read(look)
    if known:
        return Response(status_code=304, headers=headers)
    if drawn is None:
        drawn = await service.plots.plot(request, id)
    return await gzipped(request, drawn, headers)


@router.delete(
    "/policies/{id}",
    status_code=204,
    summary="Delete a policy",
)
async def delete_one_policy(request: Request, id: Digest, service: ServiceOf, caller: Admin) -> Response:
    """Delete a policy, unless an alias names it."""

    def forget(connection: Connection) -> None:
        delete_policy(connection, id)
        note(connection, caller.name, "delete policy", id, request.state.request_id)

    await service.write(forget)
    service.texts.pop(id, None)
    return Response(status_code=204)


@router.get("/differences", summary="What two policies decide otherwise")
async def get_difference(
    request: Request, service: ServiceOf, caller: Reader, before: Name, after: Name
) -> DifferenceView:
    """Compare two policies, each named by its id or an alias, by what each really holds.

    That takes the plots of both. If one is missing and its profile was deleted, the decisions are compared.
    """

    def look(connection: Connection) -> tuple[list[str], list[bytes]]:
        ids = [_resolved(connection, name) for name in (before, after)]
        return ids, [policy_text(connection, id) for id in ids]

    ids, texts = await service.read(look)
    drawings = [await _drawn(request, service, id) for id in ids]

    def compare() -> DifferenceView:
        sides = [Policy.from_json(text) for text in texts]
        held = [
            None if drawing is None else became(drawing, side)
            for side, drawing in zip(sides, drawings, strict=True)
        ]
        found = difference(sides[0], sides[1], became=(held[0], held[1]))
        return DifferenceView(
            before_id=ids[0],
            after_id=ids[1],
            same=found.same,
            words=difference_in_words(found, before, after),
            **asdict(found),
        )

    return await to_thread.run_sync(compare)


async def _drawn(request: Request, service: Service, id: str) -> bytes | None:
    """Return the plot of a policy, made now if it is missing; None if that fails or takes long."""

    found = await service.read(lambda connection: read_plot(connection, id))
    if found is None:
        with suppress(NotFound, PlannerError, SolverDied, SolveTimedOut):
            found = await service.plots.plot(request, id)
    return found


def _resolved(connection: Connection, name: str) -> str:
    if len(name) == 64 and not set(name) - set("0123456789abcdef"):
        return name
    return str(get_alias(connection, name).policy_id)
