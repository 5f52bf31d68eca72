"""Handle a request in a spawned child process, under a time limit and a memory limit.

NOTE [ Why not anyio.to_process ]

One child is started for each request with `anyio.open_process`, because `anyio.to_process` (4.16)
- leaks its worker when it is cancelled while the worker starts (anyio#1337);
- reports that a worker died, but not why;
- uses file descriptor 1, so that a line printed by native code breaks the answer;
- imports the parent's `__main__` into the child, here the whole command line.
A new child costs 0.3 s of CPU and returns all its memory. Never fork: HiGHS hangs in a forked child after a
solve in the parent.
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

from autoac.api.errors import BodyCheckTimedOut, SolverDied, SolveTimedOut
from autoac.api.requests import Kind, ParsedRequest
from autoac.api.settings import Settings

OnJobProgress = Callable[[dict[str, Any]], None]
"""Receives each piece of progress: incumbent, bound, gap, seconds; None for numbers not known yet."""


Outcome = str | bytes | ParsedRequest
"""The result of a child: an answer, a report, or a parsed request."""


class Solver(Protocol):
    """Parse and solve requests, in other processes or, in tests, in this one."""

    async def parse_request(self, kind: Kind, body: bytes) -> ParsedRequest:
        """Run `requests.parse_request`; also raise BodyCheckTimedOut or SolverDied."""
        ...

    async def answer(self, kind: Kind, body: bytes, on_progress: OnJobProgress, *, solves: int = 1) -> str:
        """Run `requests.answer`, with time for `solves` solves; also raise SolveTimedOut or SolverDied."""
        ...

    async def report(self, verb: str, body: bytes) -> bytes:
        """Run one of `policy_report.REPORTS`; also raise SolveTimedOut or SolverDied."""
        ...


PIECE = 1 << 20
HEAD = 9  # of a frame: a letter and a length
CHILD = (sys.executable, "-P", "-m", "autoac.api.solving.child_main")
SECRETS = ("AUTOAC_TOKEN", "AUTOAC_DATABASE_URL", "AUTOAC_SECRETS_DIR")


@dataclass(frozen=True, slots=True)
class SpawnedSolver:
    """A `Solver` that handles each body in a child of its own. Cancelling it kills the child."""

    time_limit_s: float  # of the planner
    grace_s: float  # more time before the child is killed
    memory_bytes: int  # of the child's address space
    command: Sequence[str] = CHILD

    @classmethod
    def of(cls, settings: Settings) -> SpawnedSolver:
        """Return a solver whose time and memory limits are those in `settings`."""
        return cls(settings.solve_time_limit_s, settings.solve_grace_s, settings.solve_memory_bytes)

    async def parse_request(self, kind: Kind, body: bytes) -> ParsedRequest:
        try:
            parsed = await self._run("parse", kind, body, self.grace_s, lambda progress: None)
        except SolveTimedOut:
            raise BodyCheckTimedOut(self.grace_s) from None
        assert isinstance(parsed, ParsedRequest)
        return parsed

    async def answer(self, kind: Kind, body: bytes, on_progress: OnJobProgress, *, solves: int = 1) -> str:
        limit = self.time_limit_s * solves + self.grace_s
        result = await self._run("answer", kind, body, limit, on_progress)
        assert isinstance(result, str)
        return result

    async def report(self, verb: str, body: bytes) -> bytes:
        made = await self._run(verb, Kind.POLICY, body, self.grace_s, lambda progress: None)
        assert isinstance(made, bytes)
        return made

    async def _run(
        self, verb: str, kind: Kind, body: bytes, limit: float, on_progress: OnJobProgress
    ) -> Outcome:
        arguments = [verb, kind.value, str(os.getpid()), str(self.memory_bytes), str(self.time_limit_s)]
        with anyio.move_on_after(limit):
            async with _child([*self.command, *arguments]) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                async with anyio.create_task_group() as group:
                    group.start_soon(_feed, process.stdin, body)
                    answer = await _listen(process.stdout, on_progress)
                    group.cancel_scope.cancel()  # a child that has answered reads no more
                return _outcome(answer, await process.wait())
        raise SolveTimedOut(limit)


@asynccontextmanager
async def _child(command: Sequence[str]) -> AsyncIterator[Process]:
    """Start a child; kill and reap it at the end. Its stderr is the service's log."""
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
    with suppress(
        anyio.BrokenResourceError, anyio.ClosedResourceError
    ):  # the child died: its exit status says more
        for start in range(0, len(body), PIECE):  # in pieces: asyncio would buffer a copy of the whole body
            await stdin.send(body[start : start + PIECE])
        await stdin.aclose()


async def _listen(stdout: ByteReceiveStream, on_progress: OnJobProgress) -> bytes:
    """Return the content of the last frame, or b"" without one; pass on each piece of progress."""
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
            on_progress(json.loads(content))
    return b""


def _outcome(answer: bytes, status: int) -> Outcome:
    if status < 0:
        raise SolverDied(f"the solver was killed by signal {-status} ({signal.strsignal(-status)})")
    if status > 0 or not answer:
        raise SolverDied(f"the solver failed with exit status {status}; the service's log says more")
    outcome = pickle.loads(answer)  # noqa: S301  (from our own child, over a pipe)
    if isinstance(outcome, Exception):
        raise outcome
    assert isinstance(outcome, Outcome)
    return outcome
