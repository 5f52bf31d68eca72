"""The routes. Who may ask is said by the router's dependency, never by looking at a path."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar, cast

import anyio
from fastapi import APIRouter, Depends, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from autoac.api.bodies import read_body
from autoac.api.errors import Busy, Unauthorised
from autoac.api.problems import (
    REF,
    InfeasibleConstraintsProblem,
    InfeasibleProblem,
    InvalidProblem,
    LimitProblem,
    OutOfTimeProblem,
    Problem,
    VersionProblem,
    documented,
)
from autoac.api.settings import Settings
from autoac.api.solver import Solve
from autoac.planner.policy import Policy

T = TypeVar("T")

RETRY_AFTER_S = 5


@dataclass(slots=True)
class Service:
    """What the routes share. The bodies in memory are bounded by the number of requests inside."""

    settings: Settings
    solver: Solve
    slots: anyio.Semaphore  # solves that run
    inside: int = field(default=0)  # requests from their first byte to their answer

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for one request.

        Raises:
            Busy: all are taken.
        """
        if self.inside >= self.settings.solves_at_once + self.settings.solves_waiting:
            raise Busy(RETRY_AFTER_S)
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    async def solve(self, body: bytes) -> str:
        """The policy's JSON, as soon as there is a slot."""
        async with self.slots:
            return await self.solver(body)


class Alive(BaseModel):
    """The process answers."""

    status: Literal["alive"] = "alive"


def service_of(request: Request) -> Service:
    """The service that the app was made with."""
    return cast(Service, request.app.state.service)


def authorised(
    service: Annotated[Service, Depends(service_of)],
    given: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
) -> None:
    """Let in who knows the token, if there is one.

    Raises:
        Unauthorised: there is one, and the request has none or another.
    """
    wanted = service.settings.token
    if wanted is None:
        return
    known = wanted.get_secret_value().encode()
    if given is None or not secrets.compare_digest(given.credentials.encode(), known):
        raise Unauthorised("this service wants its token as a bearer token: Authorization: Bearer TOKEN")


open_router = APIRouter()
router = APIRouter(dependencies=[Depends(authorised)])


@open_router.get("/livez", summary="Whether the process answers")
async def livez() -> Alive:
    """Answers while solves run; looks at nothing else. Needs no token."""
    return Alive()


@router.post(
    "/v1/policies",
    status_code=201,
    summary="The policy for a profile and a budget",
    response_class=Response,
    responses={
        201: {
            "description": "The policy",
            "content": {"application/json": {"schema": {"$ref": REF.format(model=Policy.__name__)}}},
        },
        **documented(
            {
                400: ("The body is not JSON, or not what its Content-Encoding says", (Problem,)),
                401: ("No token, or another one", (Problem,)),
                408: ("The body took too long to arrive", (Problem,)),
                413: ("The body is too large, as sent or decoded", (LimitProblem,)),
                415: ("Another Content-Type or Content-Encoding", (Problem,)),
                422: (
                    "Malformed request or profile, unknown version, no budget, "
                    "constraints that cannot be met, or no plan fits",
                    (
                        InfeasibleProblem,
                        InfeasibleConstraintsProblem,
                        InvalidProblem,
                        VersionProblem,
                        Problem,
                    ),
                ),
                500: ("The solver died, or the service failed", (Problem,)),
                503: ("Too many requests wait; Retry-After says when to ask again", (Problem,)),
                504: ("The solver ran out of time", (OutOfTimeProblem,)),
            }
        ),
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": "May be sent with Content-Encoding: zstd.",
            "content": {"application/json": {"schema": {"$ref": REF.format(model="PolicyRequest")}}},
        }
    },
)
async def create_policy(request: Request, service: Annotated[Service, Depends(service_of)]) -> Response:
    """Solve, and answer with the policy's JSON, the same text that the embedded planner gives."""
    with service.place():
        body = await read_body(request, service.settings)
        policy = await while_connected(request, lambda: service.solve(body))
    return Response(policy, status_code=201, media_type="application/json")


async def while_connected(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """What `work` gives. When the client goes away it is cancelled, so that nobody's solve burns no CPU.

    Raises:
        ClientDisconnect: the client went away.
        what `work` does.
    """

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            result = await work()
            group.cancel_scope.cancel()
            return result
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # `work` raised it: `watch` does not
    raise ClientDisconnect
