"""Test real child processes: their answers and their ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from service_fakes import (
    MIB,
    Planned,
    chain_profile,
    chatters,
    child_command,
    crashes,
    fails,
    infeasible,
    is_greedy,
    is_killed,
    leaves,
    request,
    save_all,
    sleeps,
    writes_its_pid,
)
from waiting import is_running, until

from autoac.api.errors import MalformedRequest, SolverDied, SolveTimedOut
from autoac.api.requests import Kind
from autoac.api.solving.child_process import SpawnedSolver
from autoac.planner import InfeasibleBudget, Profile, plan
from autoac.planner.units import gb_from_bytes

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


Ask = Callable[[bytes], Awaitable[str]]


def solver(plan: Callable[..., Planned], limit_s: float = 30.0) -> Ask:
    return asking(SpawnedSolver(limit_s, 0.0, 2048 * MIB, child_command(plan)))


def asking(spawned: SpawnedSolver) -> Ask:
    async def ask(body: bytes) -> str:
        return await spawned.answer(Kind.POLICY, body, lambda progress: None)

    return ask


async def test_real_child_plans_as_the_embedded_planner() -> None:
    profile = chain_profile(1 * MIB, 8 * MIB, 1 * MIB, 8 * MIB, 1 * MIB, 8 * MIB, 1 * MIB)
    real = asking(SpawnedSolver(60.0, 30.0, 8192 * MIB))
    most, least = plan(profile, budget_gb=1.0).peak, smallest_peak(profile)
    assert least < most
    for budget in (least, most):
        answer = await real(request(profile, budget_bytes=budget))
        assert answer == plan(profile, budget_bytes=budget).policy().to_json()
    with pytest.raises(InfeasibleBudget) as caught:
        await real(request(profile, budget_gb=gb_from_bytes(2 * MIB)))
    assert caught.value.budget == 2 * MIB
    assert caught.value.proven_floor > 2 * MIB


def smallest_peak(profile: Profile) -> int:
    """Return the smallest peak that the planner finds."""
    with pytest.raises(InfeasibleBudget) as caught:
        plan(profile, budget_bytes=1)
    assert caught.value.smallest_found is not None
    return caught.value.smallest_found


async def test_child_output_does_not_disturb_the_answer(profile: Profile) -> None:
    assert await solver(chatters)(request(profile, time_limit_s=7)) == (
        save_all(profile, budget_gb=1.0, time_limit_s=7).policy().to_json()
    )


async def test_errors_of_a_child_are_raised_with_their_fields(profile: Profile) -> None:
    with pytest.raises(InfeasibleBudget) as caught:
        await solver(infeasible)(request(profile))
    assert caught.value.proven_floor == 3 << 30
    assert caught.value.live[0].name == "weights"
    with pytest.raises(MalformedRequest) as malformed:
        await solver(infeasible)(b"[]")
    assert malformed.value.problems == ("the body must be an object with a profile and a budget",)


async def test_child_over_its_time_is_killed(profile: Profile, pid_file: Path) -> None:
    # A child that needs no time to start.
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    spawned = SpawnedSolver(1.0, 0.0, 2048 * MIB, [sys.executable, "-S", "-c", code])
    with pytest.raises(SolveTimedOut, match=r"no answer in 1 s"):
        await asking(spawned)(request(profile))
    assert_gone(pid_file)


async def test_cancelled_solve_kills_its_child(profile: Profile, pid_file: Path) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(solver(writes_its_pid), request(profile))
        await to_thread.run_sync(until, pid_file.exists)
        group.cancel_scope.cancel()
    assert_gone(pid_file)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (is_killed, r"signal 9 \(Killed\)"),
        (crashes, r"signal 11 \(Segmentation fault\)"),
        (fails, "exit status 1"),
        (leaves, "exit status 0"),
        (is_greedy, "more than 2.00 GiB of memory"),
    ],
)
async def test_death_of_a_child_is_reported(
    profile: Profile, plan: Callable[..., Planned], reason: str
) -> None:
    with anyio.fail_after(20), pytest.raises(SolverDied, match=reason) as caught:
        await solver(plan)(request(profile))
    assert "/srv/secret" not in str(caught.value)


async def test_child_that_reads_nothing_does_not_block() -> None:
    nothing = asking(SpawnedSolver(30.0, 0.0, 2048 * MIB, [sys.executable, "-c", "raise SystemExit(3)"]))
    with anyio.fail_after(20), pytest.raises(SolverDied, match="exit status 3"):
        await nothing(bytes(50 * MIB))


async def test_child_does_not_see_the_token(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOAC_TOKEN", "a token of more than sixteen")
    code = (
        "import os, pickle; data = pickle.dumps(os.environb.get(b'AUTOAC_TOKEN', b'none'));"
        "os.write(1, b'R' + len(data).to_bytes(8, 'big') + data)"
    )
    spawned = SpawnedSolver(0.0, 30.0, 2048 * MIB, [sys.executable, "-c", code])
    assert await spawned.report("draw", b"") == b"none"


def test_child_ends_with_a_killed_service(profile: Profile, pid_file: Path) -> None:
    spawned = f"SpawnedSolver(60.0, 0.0, 1 << 31, {child_command(writes_its_pid)!r})"
    code = (
        "import anyio, sys;"
        "from autoac.api.requests import Kind; from autoac.api.solving.child_process import SpawnedSolver;"
        f"anyio.run({spawned}.answer, Kind.POLICY, sys.stdin.buffer.read(), print)"
    )
    service = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    service.stdin.write(request(profile))
    service.stdin.close()
    until(pid_file.exists)
    pid = int(pid_file.read_text())
    service.send_signal(signal.SIGKILL)
    service.wait()
    until(lambda: not is_running(pid), 5)


async def test_solves_do_not_block_the_event_loop(profile: Profile) -> None:
    ticks = 0
    with anyio.move_on_after(1.0):
        async with anyio.create_task_group() as group:
            group.start_soon(solver(sleeps), request(profile))
            while True:
                await anyio.sleep(0.01)
                ticks += 1
    assert ticks > 50


@pytest.fixture
def pid_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file into which a child of `writes_its_pid` writes its process id."""
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    return tmp_path / "pid"


def assert_gone(pid_file: Path) -> None:
    assert not is_running(int(pid_file.read_text()))
