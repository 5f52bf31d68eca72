"""Jobs: their state, their progress as it happens, their results; and how to end them."""

from __future__ import annotations

import gzip
import time
from collections.abc import AsyncIterator
from typing import Annotated, Literal

import anyio
from anyio import to_thread
from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Send
from starlette.types import Scope as Connection

from autoac.api.errors import Forbidden, NotFound
from autoac.api.problems import Problem, QueueProblem
from autoac.api.requests import Kind
from autoac.api.routes.access import Planner, Reader, ServiceOf
from autoac.api.routes.openapi_helpers import (
    GONE,
    gives,
    json_text,
    problems,
)
from autoac.api.routes.pagination import Page, PieceOf
from autoac.api.routes.solves import SOLVE
from autoac.api.routes.views import JobView
from autoac.api.service import Service
from autoac.api.storage.database import AWAY
from autoac.api.storage.event_feed import LOOK_S, EventFeed
from autoac.api.storage.job_store import RETRY_AFTER_S, Job, JobState
from autoac.api.storage.keys import Scope

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

JobId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
ALIVE_S = 15.0  # between two comments that keep a quiet stream open


@router.get("", summary="Jobs, newest first", responses=problems())
async def get_jobs(
    service: ServiceOf,
    caller: Reader,
    piece: PieceOf,
    state: JobState | None = None,
    kind: Literal[Kind.POLICY, Kind.FRONTIER, Kind.FLOOR] | None = None,
    profile: Annotated[str | None, Query(pattern="^[0-9a-f]{64}$", description="Its digest.")] = None,
) -> Page[JobView]:
    """Without their progress."""
    jobs = service.jobs

    def look() -> Page[JobView]:
        before = piece.before
        found = jobs.page(state=state, kind=kind, profile=profile, before=before, limit=piece.rows)
        return piece.page(found, JobView.of)

    return await to_thread.run_sync(look)


@router.get("/{id}", summary="A job", responses=problems(GONE))
async def get_job(id: JobId, response: Response, service: ServiceOf, caller: Reader) -> JobView:
    """Its state and how far it is. While it is not final, Retry-After says when to look again."""

    def look() -> JobView:
        return JobView.of(service.jobs.get(id), service.jobs.progress(id))

    found = await to_thread.run_sync(look)
    if not found.state.final:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return found


@router.get(
    "/{id}/result",
    summary="What a job gave",
    response_class=Response,
    responses={
        200: gives("JobResult", "The policy, frontier or floor"),
        202: {"model": JobView, "description": "It is not finished"},
        **problems(GONE, SOLVE),
    },
)
async def get_result(id: JobId, service: ServiceOf, caller: Reader) -> Response:
    """The result, or the problem that the job ended with."""

    def look() -> tuple[Job, bytes]:
        job = service.jobs.get(id)
        return job, service.jobs.result(job) if job.final else b""

    job, result = await to_thread.run_sync(look)
    if not job.final:
        return json_text(JobView.of(job).model_dump_json(), 202, {"Retry-After": str(RETRY_AFTER_S)})
    return json_text(result)


@router.get(
    "/{id}/drawing",
    summary="What a page draws of a frontier",
    response_class=Response,
    responses={
        200: {
            "description": "Memory over the step, and what became of each op, for each point",
            "content": {"application/json": {"schema": {"type": "object"}}},
        },
        **problems(GONE),
    },
)
async def get_drawing(request: Request, id: JobId, service: ServiceOf, caller: Reader) -> Response:
    """As the pages of this release draw it; other releases may have other members."""
    drawn = await to_thread.run_sync(service.jobs.plot, id)
    headers = {"Cache-Control": "private, max-age=3600", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return json_text(drawn, headers=headers | {"Content-Encoding": "gzip"})
    return json_text(await to_thread.run_sync(gzip.decompress, drawn), headers=headers)


@router.delete("/{id}", summary="Cancel a job", responses=problems(GONE))
async def cancel_job(request: Request, id: JobId, service: ServiceOf, caller: Planner) -> JobView:
    """Whoever solves it stops within a second. A job that is final stays as it is.

    A key cancels the jobs that it asked for, one with the scope admin every job.
    """

    def cancel() -> JobView:
        job = service.jobs.get(id)
        if caller.scope < Scope.ADMIN and job.owner != caller.name:
            raise Forbidden("only the key that asked for a job, or one with the scope admin, cancels it")
        cancelled = service.requests.cancel(id)
        service.note(caller, "cancel job", id, request)
        return JobView.of(cancelled, service.jobs.progress(id))

    return await to_thread.run_sync(cancel)


@router.get(
    "/{id}/events",
    summary="What happens to a job, as it happens",
    response_class=Response,
    responses={
        200: {
            "description": "Events `state` and `progress`, each with JSON as its data; ends with the job",
            "content": {"text/event-stream": {}},
        },
        204: {"description": "The job has ended, and Last-Event-ID is its last event"},
        **problems(
            GONE,
            {
                422: ("A parameter is not what it should be", (Problem,)),
                429: ("This key listens to as many jobs as it may", (QueueProblem,)),
            },
        ),
    },
)
async def get_events(
    id: JobId,
    service: ServiceOf,
    caller: Reader,
    last_event_id: Annotated[str | None, Header(description="Go on after this event.")] = None,
) -> Response:
    """Server-sent events, from the first or from after Last-Event-ID."""
    number = last_event_id or "0"
    # A browser sends back what it was given; anything else begins at the beginning.
    after = int(number) if number.isascii() and number.isdigit() and len(number) < 18 else 0
    job = await to_thread.run_sync(service.jobs.get, id)
    if job.final and not await to_thread.run_sync(service.jobs.events, id, after, 1):
        return Response(status_code=204)  # a browser's EventSource takes it as the end
    return _EventStream(service, caller.name, _stream(service.feed(id), after))


class _EventStream(StreamingResponse):
    """Events as they happen. Counts as one of its caller's streams for as long as it is sent."""

    def __init__(self, service: Service, caller: str, content: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._service, self._caller = service, caller

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        with self._service.stream(self._caller):
            await super().__call__(scope, receive, send)


async def _stream(feed: EventFeed, after: int) -> AsyncIterator[str]:
    said = time.monotonic()
    while True:
        try:
            await feed.look()
        except AWAY:
            await anyio.sleep(1.0)
            continue
        except NotFound:  # pruned while somebody watched
            return
        ended, events = feed.ended, feed.after(after)
        for event in events:
            after = event.number
            yield f"id: {event.number}\nevent: {event.kind}\ndata: {event.data}\n\n"
        if ended:
            return
        if events:
            said = time.monotonic()
        elif time.monotonic() - said > ALIVE_S:
            said = time.monotonic()
            yield ": still there\n\n"
        await anyio.sleep(LOOK_S)
