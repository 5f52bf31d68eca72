"""Works on a request in a spawned child, under a time limit and a memory limit.

NOTE [ Why not anyio.to_process ]

One child is started for each request with `anyio.open_process`, because `anyio.to_process` (4.16)
- leaves its worker alive and forgotten when it is cancelled while the worker starts (anyio#1337);
- says that a worker died, and not of what;
- speaks over file descriptor 1, so that a line printed by native code breaks the answer;
- imports the parent's `__main__` into the child, here the whole command line.
A fresh child costs 0.3 s of CPU and gives all its memory back. Never fork: HiGHS hangs in a forked child
after a solve in the parent.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, Process

from autoac.api.errors import SolverDied, SolveTimedOut
from autoac.api.requests import Answer, Kind, ParsedRequest
from autoac.api.settings import Settings

OnJobProgress = Callable[[dict[str, Any]], None]
"""Called with each piece of progress: incumbent, bound, gap, seconds; None for what is not there yet."""


Outcome = Answer | bytes | ParsedRequest
"""What a child gives: an answer, a drawing, or a request that was checked."""


class Solver(Protocol):
    """Reads requests and solves them, outside of this process or, in tests, in it."""

    async def parse_request(self, kind: Kind, body: bytes) -> ParsedRequest:
        """As `request.take`. Raises what that does, and SolveTimedOut, SolverDied."""
        ...

    async def answer(
        self, kind: Kind, body: bytes, told: OnJobProgress, *, solves: int = 1, draws: bool = False
    ) -> Answer:
        """As `request.answer`, with time for so many solves; raises what `take` does.

        With `draws`, a policy comes with its drawing, unless that fails or takes long.
        """
        ...

    async def draw(self, body: bytes) -> bytes:
        """As `drawing.plot_from_body`; raises what that does, and SolveTimedOut, SolverDied."""
        ...


PIECE = 1 << 20
HEAD = 9  # of a frame: a letter and a length
CHILD = (sys.executable, "-P", "-m", "autoac.api.solving.child_main")
SECRETS = ("AUTOAC_TOKEN", "AUTOAC_DATABASE_URL")


@dataclass(frozen=True, slots=True)
class SpawnedSolver:
    """A `Solver` that works on each body in a child of its own. Cancelling it kills the child."""

    time_limit_s: float  # the most that the planner gets
    grace_s: float  # beyond it, before the child is killed
    memory_bytes: int  # of the child's address space
    command: Sequence[str] = CHILD

    @classmethod
    def of(cls, settings: Settings) -> SpawnedSolver:
        """Return the solver with the limits of the settings."""
        return cls(settings.solve_time_limit_s, settings.solve_grace_s, settings.solve_memory_bytes)

    async def parse_request(self, kind: Kind, body: bytes) -> ParsedRequest:
        parsed = await self._run("parse", kind, body, self.grace_s, lambda progress: None)
        assert isinstance(parsed, ParsedRequest)
        return parsed

    async def answer(
        self, kind: Kind, body: bytes, told: OnJobProgress, *, solves: int = 1, draws: bool = False
    ) -> Answer:
        limit = self.time_limit_s * solves + self.grace_s
        made = await self._run("answer-and-draw" if draws else "answer", kind, body, limit, told)
        assert isinstance(made, Answer)
        return made

    async def draw(self, body: bytes) -> bytes:
        drawn = await self._run("draw", Kind.POLICY, body, self.grace_s, lambda progress: None)
        assert isinstance(drawn, bytes)
        return drawn

    async def _run(self, verb: str, kind: Kind, body: bytes, limit: float, told: OnJobProgress) -> Outcome:
        arguments = [verb, kind.value, str(os.getpid()), str(self.memory_bytes), str(self.time_limit_s)]
        with anyio.move_on_after(limit):
            async with _child([*self.command, *arguments]) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                async with anyio.create_task_group() as group:
                    group.start_soon(_feed, process.stdin, body)
                    answer = await _listen(process.stdout, told)
                    group.cancel_scope.cancel()  # a child that has answered reads no more
                return _outcome(answer, await process.wait())
        raise SolveTimedOut(limit)


@asynccontextmanager
async def _child(command: Sequence[str]) -> AsyncIterator[Process]:
    """A running child, dead and reaped on the way out. Its stderr is ours: the service's log."""
    # One thread: the solver uses one, and each thread of a BLAS reserves address space.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment = {k: v for k, v in os.environ.items() if k not in SECRETS} | threads
    process = await anyio.open_process(command, stderr=None, env=environment)
    try:
        yield process
    finally:
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError):  # it has ended
                process.kill()
            await process.aclose()


async def _feed(stdin: ByteSendStream, body: bytes) -> None:
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # it died: its exit status says more
        for start in range(0, len(body), PIECE):  # at once, and asyncio would buffer a copy of it all
            await stdin.send(body[start : start + PIECE])
        await stdin.aclose()


async def _listen(stdout: ByteReceiveStream, told: OnJobProgress) -> bytes:
    """The content of the last frame; each piece of progress goes to `told`. Empty where none was whole."""
    buffer = bytearray()
    async for chunk in stdout:
        buffer += chunk
        while len(buffer) >= HEAD:
            end = HEAD + int.from_bytes(buffer[1:HEAD], "big")
            if len(buffer) < end:
                break
            letter, content = bytes(buffer[:1]), bytes(buffer[HEAD:end])
            del buffer[:end]
            if letter == b"R":
                return content
            told(json.loads(content))
    return b""


def _outcome(answer: bytes, status: int) -> Outcome:
    if status < 0:
        raise SolverDied(f"the solver was ended by signal {-status} ({signal.strsignal(-status)})")
    if status > 0 or not answer:
        raise SolverDied(f"the solver failed with exit status {status}; the service's log says more")
    outcome = pickle.loads(answer)  # noqa: S301  (from our own child, over a pipe)
    if isinstance(outcome, Exception):
        raise outcome
    assert isinstance(outcome, Outcome)
    return outcome
