"""Whether the service lives, whether it can serve, which it is, and what it counts."""

from __future__ import annotations

from typing import Annotated, Literal

from anyio import to_thread
from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel

from autoac.api.routes.access import Needs, Reader, ServiceOf
from autoac.api.routes.openapi_helpers import problems
from autoac.api.routes.pagination import Page, PieceOf
from autoac.api.routes.views import AuditLine, audit_lines
from autoac.api.storage.database import AWAY, DatabaseNotReady, DatabaseReadOnly
from autoac.api.storage.keys import Scope
from autoac.api.telemetry.metrics import MEDIA_TYPE
from autoac.planner.formats.policy import tool_versions

router = APIRouter()

Part = Literal["ok", "failed"]


class Alive(BaseModel):
    """Answer 200 while the process does its work, 503 once a runner of its own has ended."""

    status: Literal["alive", "runner ended"] = "alive"


class Readiness(BaseModel):
    """Whether the service can do its work, part by part."""

    status: Literal["ready", "not ready"]
    database: Part  # it answers, and takes writes
    migrations: Part  # its tables are those of this release
    runners: Part  # somebody solves


class Version(BaseModel):
    """What the service is made of."""

    autoac: str
    tools: dict[str, str]


@router.get(
    "/livez",
    summary="Whether the process answers",
    responses={503: {"model": Alive, "description": "Its runner has ended; only a restart helps"}},
)
async def livez(service: ServiceOf, response: Response) -> Alive:
    """Answers while solves run, without asking the database. Needs no key."""
    if service.worker_failed:
        response.status_code = 503
        return Alive(status="runner ended")
    return Alive()


@router.get(
    "/readyz",
    summary="Whether the service can do its work",
    responses={503: {"model": Readiness, "description": "A part has failed"}},
)
async def readyz(service: ServiceOf, response: Response) -> Readiness:
    """Looks at the database, its tables, and whether there is a runner or a worker. Needs no key."""

    def look() -> tuple[Part, Part, Part]:
        try:
            service.database.check()
            service.database.check_writable()
            solving = service.worker_count()
        except DatabaseNotReady:
            return "ok", "failed", "failed"
        except (DatabaseReadOnly, *AWAY):
            return "failed", "failed", "failed"
        return "ok", "ok", "ok" if solving else "failed"

    database, migrations, runners = await to_thread.run_sync(look)
    ready = "failed" not in (database, migrations, runners)
    if not ready:
        response.status_code = 503
    return Readiness(
        status="ready" if ready else "not ready",
        database=database,
        migrations=migrations,
        runners=runners,
    )


@router.get("/version", summary="What the service is made of", responses=problems())
async def version(caller: Reader) -> Version:
    """The versions that also stand in each policy."""
    tools = tool_versions()
    return Version(autoac=tools["autoac"], tools=tools)


@router.get(
    "/metrics",
    summary="What is counted, for Prometheus",
    response_class=Response,
    responses={200: {"description": "Metrics", "content": {"text/plain": {}}}, **problems()},
    dependencies=[Depends(Needs(Scope.READ))],
)
async def metrics(service: ServiceOf) -> Response:
    """This process's counters, and the jobs and runners that the database knows of."""

    def look() -> tuple[dict[str, int], int]:
        return service.jobs.count_by_state(), service.worker_count()

    depth, runners = await to_thread.run_sync(look)
    return Response(service.metrics.text(depth, runners), media_type=MEDIA_TYPE)


@router.get("/v1/audit", summary="Who did what", responses=problems())
async def audit(
    service: ServiceOf, caller: Annotated[object, Depends(Needs(Scope.ADMIN))], piece: PieceOf
) -> Page[AuditLine]:
    """Newest first."""

    def look() -> Page[AuditLine]:
        with service.database.read() as connection:
            return piece.page(audit_lines(connection, piece.before, piece.rows), lambda line: line)

    return await to_thread.run_sync(look)
