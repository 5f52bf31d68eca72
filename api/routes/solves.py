"""Solve for a policy, a frontier or a floor: at once if it is quick, else as a job."""

from __future__ import annotations

import math
import re
import time

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from autoac.api.problems import REF
from autoac.api.requests import Kind
from autoac.api.routes.access import Planner, ServiceOf
from autoac.api.routes.openapi_helpers import JSON, body_of, etag, gives, json_text
from autoac.api.routes.views import JobView
from autoac.api.service import Service
from autoac.api.storage.job_store import RETRY_AFTER_S, JobState
from autoac.api.storage.keys import Caller

router = APIRouter(prefix="/v1", tags=["solves"])

PREFER = [
    {
        "name": "Prefer",
        "in": "header",
        "required": False,
        "description": "wait=N: wait up to N seconds for the result.",
        "schema": {"type": "string"},
    }
]


async def _solved(request: Request, service: Service, caller: Caller, kind: Kind) -> Response:
    parsed = await service.reader.parse_request(request, kind)
    fresh = "no-cache" in request.headers.get("cache-control", "").lower()
    preferred = preferred_wait(request.headers.getlist("prefer"))
    seconds = service.settings.wait_s if preferred is None else min(preferred, service.settings.max_wait_s)
    began = time.monotonic()
    job = await service.submit(parsed, caller, fresh=fresh)
    job = await service.wait(request, job, seconds)
    if job.state is JobState.CANCELLED and job.owner != caller.name:  # by its owner, not by this caller
        job = await service.submit(parsed, caller, fresh=fresh)
        job = await service.wait(request, job, max(0.0, seconds - (time.monotonic() - began)))
    applied = {} if preferred is None else {"Preference-Applied": f"wait={math.floor(seconds)}"}
    if not job.final:
        headers = {"Location": f"/v1/jobs/{job.id}", "Retry-After": str(RETRY_AFTER_S)} | applied
        return json_text(JobView.of(job).model_dump_json(), 202, headers)
    result = await to_thread.run_sync(service.jobs.result, job)
    if job.policy_id is not None:
        headers = {"Location": f"/v1/policies/{job.policy_id}", "ETag": etag(job.policy_id)} | applied
        return json_text(result, 201, headers)
    return json_text(result, 200, {"Location": f"/v1/jobs/{job.id}/result"} | applied)


def _add_route(kind: Kind, model: str, status: int, summary: str, description: str) -> None:
    """Add the route that solves for one kind of answer; `model` and `status` are those of its answer."""

    async def create(request: Request, service: ServiceOf, caller: Planner) -> Response:
        return await _solved(request, service, caller, kind)

    path = {Kind.POLICY: "/policies", Kind.FRONTIER: "/frontiers", Kind.FLOOR: "/floors"}[kind]
    job = {
        "description": "A job, since the solve takes longer",
        "headers": {name: {"schema": {"type": "string"}} for name in ("Location", "Retry-After")},
        "content": {JSON: {"schema": {"$ref": REF.format(model="JobView")}}},
    }
    router.add_api_route(
        path,
        create,
        methods=["POST"],
        status_code=status,
        summary=summary,
        description=description,
        response_class=Response,
        responses={status: gives(model, summary, "Location", "ETag"), 202: job},
        openapi_extra=body_of(f"{kind.name.title()}Request") | {"parameters": PREFER},
    )


_add_route(
    *(Kind.POLICY, "Policy", 201, "The policy for a profile and a budget"),
    "Plan a policy, with the text that the embedded planner makes. Equal requests share one solve.",
)
_add_route(
    *(Kind.FRONTIER, "FrontierView", 200, "Plans over a range of budgets"),
    "Plan from the minimum peak to the peak with nothing recomputed.",
)
_add_route(
    *(Kind.FLOOR, "FloorView", 200, "The smallest peak that any plan has"),
    "Find the minimum peak and its proven lower bound.",
)


def preferred_wait(headers: list[str]) -> float | None:
    """Return the seconds of `Prefer: wait=N` (RFC 7240), or None without a valid number."""
    for preference in ",".join(headers).split(","):
        found = re.fullmatch(r'\s*wait\s*=\s*"?([0-9]{1,9})"?\s*(;.*)?', preference, re.IGNORECASE)
        if found:
            return float(found[1])
    return None
