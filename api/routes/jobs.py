"""Jobs: their state, progress, events and results; and cancelling them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Literal

import anyio
from anyio import to_thread
from fastapi import APIRouter, Header, Path, Query, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Send
from starlette.types import Scope as Connection

from autoac.api.errors import Forbidden, NotFound
from autoac.api.routes.access import Planner, Reader, ServiceOf
from autoac.api.routes.openapi_helpers import gives, json_text
from autoac.api.routes.pagination import Page, PieceOf
from autoac.api.routes.views import JobView
from autoac.api.service import Service
from autoac.api.storage.database import AWAY
from autoac.api.storage.event_feed import LOOK_S, EventFeed
from autoac.api.storage.job_store import RETRY_AFTER_S, Job, JobState
from autoac.api.storage.keys import Scope

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

JobId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
ALIVE_S = 15.0  # between two comments that keep a quiet stream open


@router.get("", summary="Jobs, newest first")
async def get_jobs(
    service: ServiceOf,
    caller: Reader,
    piece: PieceOf,
    state: JobState | None = None,
    kind: Literal["policy", "frontier", "floor"] | None = None,
    profile: Annotated[
        str | None, Query(pattern="^[0-9a-f]{64}$", description="Digest of a profile.")
    ] = None,
) -> Page[JobView]:
    """List jobs without their progress."""
    wanted = {"state": state, "kind": kind, "profile_digest": profile}

    def look() -> Page[JobView]:
        return piece.page(service.jobs.page(wanted, before=piece.before, limit=piece.rows), JobView.of)

    return await to_thread.run_sync(look)


@router.get("/{id}", summary="A job")
async def get_job(id: JobId, response: Response, service: ServiceOf, caller: Reader) -> JobView:
    """Get state and progress. Until the job is final, Retry-After says when to poll again."""

    def look() -> JobView:
        return JobView.of(service.jobs.get(id), service.jobs.progress(id))

    found = await to_thread.run_sync(look)
    if not found.state.final:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return found


@router.get(
    "/{id}/result",
    summary="The result of a job",
    response_class=Response,
    responses={
        200: gives("JobResult", "The policy, frontier or floor"),
        202: {"model": JobView, "description": "The job is not finished"},
    },
)
async def get_result(id: JobId, service: ServiceOf, caller: Reader) -> Response:
    """Get the result, or the problem of a failed job."""

    def look() -> tuple[Job, bytes]:
        job = service.jobs.get(id)
        return job, service.jobs.result(job) if job.final else b""

    job, result = await to_thread.run_sync(look)
    if not job.final:
        return json_text(JobView.of(job).model_dump_json(), 202, {"Retry-After": str(RETRY_AFTER_S)})
    return json_text(result)


@router.delete("/{id}", summary="Cancel a job")
async def cancel_job(id: JobId, service: ServiceOf, caller: Planner) -> JobView:
    """Cancel a job; its runner stops within a second. A final job stays as it is.

    A key cancels its own jobs; the scope admin cancels any job.
    """

    def cancel() -> JobView:
        job = service.jobs.get(id)
        if caller.scope < Scope.ADMIN and job.owner != caller.name:
            raise Forbidden(
                "a job can be cancelled by the key that submitted it, or by one with the scope admin"
            )
        return JobView.of(service.requests.cancel(id), service.jobs.progress(id))

    return await to_thread.run_sync(cancel)


@router.get(
    "/{id}/events",
    summary="The events of a job, as they happen",
    response_class=Response,
    responses={
        200: {
            "description": "Events `state` and `progress`, each with JSON as its data; ends with the job",
            "content": {"text/event-stream": {}},
        },
        204: {"description": "The job is final, and Last-Event-ID is its last event"},
    },
)
async def get_events(
    id: JobId,
    service: ServiceOf,
    caller: Reader,
    last_event_id: Annotated[str | None, Header(description="Continue after this event.")] = None,
) -> Response:
    """Stream server-sent events, from the first one or after Last-Event-ID."""
    number = last_event_id or "0"
    # A browser repeats an id of ours; any other text starts from the first event.
    after = int(number) if number.isascii() and number.isdigit() and len(number) < 18 else 0
    job = await to_thread.run_sync(service.jobs.get, id)
    if job.final and not await to_thread.run_sync(service.jobs.events, id, after, 1):
        return Response(status_code=204)  # this ends a browser's EventSource
    return _EventStream(service, caller.name, _stream(service.feed(id), after))


class _EventStream(StreamingResponse):
    """Send events as they happen, and count as one of the caller's streams meanwhile."""

    def __init__(self, service: Service, caller: str, content: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._service, self._caller = service, caller

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        with self._service.stream(self._caller):
            await super().__call__(scope, receive, send)


async def _stream(feed: EventFeed, after: int) -> AsyncIterator[str]:
    sent_at = time.monotonic()
    while True:
        try:
            await feed.look()
        except AWAY:
            await anyio.sleep(1.0)
            continue
        except NotFound:  # pruned in the meantime
            return
        ended, events = feed.ended, feed.after(after)
        for event in events:
            after = event.number
            yield f"id: {event.number}\nevent: {event.kind}\ndata: {event.data}\n\n"
        if ended:
            return
        if events:
            sent_at = time.monotonic()
        elif time.monotonic() - sent_at > ALIVE_S:
            sent_at = time.monotonic()
            yield ": still there\n\n"
        await anyio.sleep(LOOK_S)
