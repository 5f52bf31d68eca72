"""Liveness, readiness, versions and metrics."""

from __future__ import annotations

from typing import Literal

from anyio import to_thread
from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel

from autoac.api.errors import DatabaseNotReady
from autoac.api.routes.access import Needs, Reader, ServiceOf
from autoac.api.storage.database import AWAY, DatabaseReadOnly
from autoac.api.storage.keys import Scope
from autoac.api.telemetry.metrics import MEDIA_TYPE
from autoac.planner.formats.policy import tool_versions

router = APIRouter()

Part = Literal["ok", "failed"]


class Alive(BaseModel):
    """The response of /livez: whether the process is alive."""

    status: Literal["alive", "runner ended", "runner deaf"] = "alive"


class Readiness(BaseModel):
    """The response of /readyz: for each part of the service, whether it works."""

    status: Literal["ready", "not ready"]
    database: Part  # the database answers and takes writes
    migrations: Part  # the tables are those of this release
    runners: Part  # a runner or a worker is alive


class Version(BaseModel):
    """The versions of the service and its tools."""

    autoac: str
    tools: dict[str, str]


@router.get(
    "/livez",
    summary="Check that the process answers",
    responses={503: {"model": Alive, "description": "The runner no longer works; restart the service"}},
)
async def livez(service: ServiceOf, response: Response) -> Alive:
    """Answer without the database, even while solves run. Needs no key."""
    if service.worker_failed:
        response.status_code = 503
        return Alive(status="runner ended")
    if service.worker is not None and service.worker.deaf:
        response.status_code = 503
        return Alive(status="runner deaf")
    return Alive()


@router.get(
    "/readyz",
    summary="Check that the service can work",
    responses={503: {"model": Readiness, "description": "A part is not ready"}},
)
async def readyz(service: ServiceOf, response: Response) -> Readiness:
    """Check the database, its tables, and that a runner or a worker is alive. Needs no key."""

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


@router.get("/version", summary="Versions")
async def version(caller: Reader) -> Version:
    """Get the versions that each policy also records."""
    tools = tool_versions()
    return Version(autoac=tools["autoac"], tools=tools)


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    responses={200: {"description": "Metrics", "content": {"text/plain": {}}}},
    dependencies=[Depends(Needs(Scope.READ))],
)
async def metrics(service: ServiceOf) -> Response:
    """Get this process's counters, and the jobs and runners in the database."""

    def look() -> tuple[dict[str, int], int]:
        return service.jobs.count_by_state(), service.worker_count()

    by_state, runners = await to_thread.run_sync(look)
    return Response(service.metrics.text(by_state, runners), media_type=MEDIA_TYPE)
