"""A small profile, and planners that replace the real one.

Run as a program, this file is a service, a worker, or a child of theirs, with the planner that an argument
names.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

sys.path.append(str(Path(__file__).parents[1] / "planner"))
import graphs

from autoac.api.policy_report import REPORTS
from autoac.api.requests import Kind, ParsedRequest, answer, parse_request
from autoac.api.solving import child_main as child
from autoac.api.solving.child_process import OnJobProgress, SpawnedSolver
from autoac.planner.errors import Holding, InfeasibleBudget, SolverOutOfTime
from autoac.planner.formats.constraints import Constraints
from autoac.planner.formats.policy import Policy, Predicted, decisions, tool_versions
from autoac.planner.formats.profile import Profile
from autoac.planner.solver.highs import OnProgress, Progress
from autoac.planner.solver.time_limit import Clock
from autoac.planner.units import bytes_from_gb

MIB = 1 << 20


def chain_profile(*sizes: int, model: str = "Chain") -> Profile:
    """Return a chain: op `i` reads op `i - 1` and allocates `sizes[i]`; backward unpacks outputs, last first.

    benchmarks/service.py uses it too.
    """
    tape, values, saved = graphs.Tape(model, static=MIB, gradients=MIB), [], []
    for size in sizes or (4 * MIB, 8 * MIB, 2 * MIB):
        values += tape.op("aten.mm.default", values[-1:], size, us=10.0, module="chain")
        saved.append(tape.save(values[-1]))
    for handle in reversed(saved):
        tape.step("MmBackward0", [handle], us=20.0, peak=64)
    tape.released = [min(v + 2, len(values)) for v in values]
    made = tape.profile()
    cpu = {"device_type": "cpu", "device_name": "two cores"}
    environment = made.environment.model_copy(update=cpu)
    return made.model_copy(update={"environment": environment, "inputs": ("float32[4, 8]",)})


def request(profile: Profile | dict[str, Any] | None, **options: Any) -> bytes:
    """Return the body of a request; its budget is 1 GiB unless the options have one."""
    data = profile.model_dump(mode="json") if isinstance(profile, Profile) else profile
    budget = {} if {"budget_gb", "budget_bytes"} & options.keys() else {"budget_gb": 1.0}
    return json.dumps({"profile": data, **budget, **options}).encode()


@dataclass
class Planned:
    """The part of a Plan that the service uses."""

    made: Policy

    def policy(self) -> Policy:
        return self.made


def save_all(
    profile: Profile,
    *,
    budget_gb: float | None = None,
    budget_bytes: int | None = None,
    gap: float = 0.01,
    time_limit_s: float = 120.0,  # the maximum of the service, and its default
    constraints: Constraints | None = None,
    clock: Clock | None = None,
    progress: OnProgress | None = None,
) -> Planned:
    """Plan to save everything, and write the options into the policy, where a test can read them."""
    budget = budget_bytes if budget_bytes is not None else bytes_from_gb(budget_gb or 0.0)
    predicted = Predicted(
        peak_bytes=1,
        peak_at="chain/aten.mm.default#2, forward",
        save_all_peak_bytes=1,
        static_bytes=1,
        recompute_us=0.0,
        recompute_bound_us=0.0,
        step_us=90.0,
        gap=0.0,
        stall_us=0.0,
        moved_bytes=0,
        microbatches=1,
    )
    return Planned(
        Policy(
            model=profile.model,
            fingerprint=profile.fingerprint,
            profile_digest=profile.digest,
            inputs=profile.inputs,
            device=profile.environment.device_name,
            budget_bytes=budget,
            stopped=f"gap {gap}, time limit {time_limit_s:g} s",
            predicted=predicted,
            tools=tool_versions(),
            corrected_by_bytes=0,
            constraints=constraints or Constraints(),
            forward_ends=(),
            use_groups={},
            moves={},
            needed_until={},
            decisions=decisions(profile, frozenset(range(len(profile.ops)))),
        )
    )


def infeasible(profile: Profile, **options: Any) -> Planned:
    raise InfeasibleBudget(
        1 << 30,
        3 << 30,
        4 << 30,
        "chain/aten.mm.default#1, forward",
        [Holding(3 << 30, "weights", "not planned")],
    )


def out_of_time(profile: Profile, **options: Any) -> Planned:
    raise SolverOutOfTime(1 << 30, options["time_limit_s"], 1 << 29, 1 << 31)


def sleeps(profile: Profile, **options: Any) -> Planned:
    time.sleep(60)
    raise AssertionError("slept")


def is_killed(profile: Profile, **options: Any) -> Planned:
    os.kill(os.getpid(), signal.SIGKILL)
    return sleeps(profile)


def crashes(profile: Profile, **options: Any) -> Planned:
    ctypes.string_at(0)
    return sleeps(profile)


def fails(profile: Profile, **options: Any) -> Planned:
    raise RuntimeError("a bug, with a path: /srv/secret")


def leaves(profile: Profile, **options: Any) -> Planned:
    os._exit(0)


def is_greedy(profile: Profile, **options: Any) -> Planned:
    bytearray(16 << 30)
    return sleeps(profile)


def chatters(profile: Profile, **options: Any) -> Planned:
    os.write(1, b"Running HiGHS 1.15\n")  # as C code would, past sys.stdout
    return save_all(profile, **options)


def writes_its_pid(profile: Profile, **options: Any) -> Planned:
    """Write the process id into the file that the environment names, and sleep."""
    path = Path(os.environ["PID_FILE"])
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)  # renamed, so that the file is never seen half written
    return sleeps(profile)


@dataclass(frozen=True)
class InProcess:
    """A `Solver` that parses and plans in this process."""

    plan: Callable[..., Planned]
    most_seconds: float = 120.0

    async def parse_request(self, kind: Kind, body: bytes) -> ParsedRequest:
        return parse_request(kind, body, self.most_seconds)

    async def answer(self, kind: Kind, body: bytes, on_progress: OnJobProgress, *, solves: int = 1) -> str:
        return self.solve(kind, body, on_progress)

    def solve(self, kind: Kind, body: bytes, on_progress: OnJobProgress) -> str:
        """Do the work of `answer`."""

        def progress(now: Progress) -> None:
            numbers = {"incumbent": now.primal, "bound": now.dual, "gap": now.gap, "seconds": now.seconds}
            on_progress(numbers | {"point": now.point, "points": now.points})

        return answer(kind, body, most_seconds=self.most_seconds, plan=self.plan, progress=progress)

    async def report(self, verb: str, body: bytes) -> bytes:
        return REPORTS[verb](body)


@dataclass(frozen=True)
class Raising(InProcess):
    """A `Solver` whose `answer` raises an error."""

    plan: Callable[..., Planned] = save_all
    error: Exception = field(default_factory=Exception)

    async def answer(self, kind: Kind, body: bytes, on_progress: OnJobProgress, *, solves: int = 1) -> str:
        raise self.error


@dataclass(frozen=True)
class Held(InProcess):
    """A `Solver` that waits for the event `go`. `log` records beginnings and ends."""

    plan: Callable[..., Planned] = save_all
    go: anyio.Event = field(default_factory=anyio.Event)
    log: list[str] = field(default_factory=list)

    async def answer(self, kind: Kind, body: bytes, on_progress: OnJobProgress, *, solves: int = 1) -> str:
        self.log.append("began")
        on_progress({"incumbent": 10.0, "bound": 5.0, "gap": 0.5, "seconds": 0.1})
        try:
            await self.go.wait()
        except anyio.get_cancelled_exc_class():
            self.log.append("killed")
            raise
        self.log.append("ended")
        return await InProcess.answer(self, kind, body, on_progress, solves=solves)


def waits_for_a_file(profile: Profile, **options: Any) -> Planned:
    """Wait for the file that the environment names; append the process id to its `.began` file first."""
    end = time.monotonic() + 600
    gate = Path(os.environ["GATE_FILE"])
    with gate.with_suffix(".began").open("a") as began:
        began.write(f"{os.getpid()}\n")
    while not gate.exists():
        assert time.monotonic() < end, f"{gate} must appear within 600 s"
        time.sleep(0.02)
    return save_all(profile, **options)


def child_command(plan: Callable[..., Planned]) -> list[str]:
    """Return the command of a child that plans with one of the functions above."""
    return [sys.executable, "-P", __file__, "child", plan.__name__]


if __name__ == "__main__":
    role, name, *rest = sys.argv[1:]
    if role == "child":
        child.main(rest, plan=globals()[name])
    else:  # the service or a worker, with such children
        from autoac.api.cli import commands

        command = child_command(globals()[name])
        sys.exit(commands.main([role, *rest], SpawnedSolver(120.0, 30.0, 2048 * MIB, command)))
