"""Run the tests of this folder in a process of their own, which has a device named "cuda".

Those marked `gpu` run in this process on a machine with a GPU, and there.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from waiting import NotInTime, until

from standin.library import CannotBuild, library

HERE = Path(__file__).parent
ANSWER_S = 300
IN_CHILD = "standin.child" in sys.modules


class Child:
    """The process with the device, started by the first test of this process."""

    def __init__(self, built: Path) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        answers, write = os.pipe()
        self._answers = os.fdopen(answers)
        path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "standin.child", str(built), str(write)],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=[write],
            cwd=HERE.parents[1],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        os.close(write)

    def run(self, nodeid: str) -> list[Any]:
        """Run one test there, and return its reports.

        Raises:
            RuntimeError: the process died, or hangs.
        """
        self._process.stdin.write(f"{nodeid}\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._answers], [], [], ANSWER_S)
        if ready and (line := self._answers.readline()):
            return json.loads(line)
        self._process.kill()
        self._process.wait()
        self._output.seek(0)
        said = self._output.read()[-4000:].decode(errors="replace")
        self.end()
        raise RuntimeError(
            f"the process with the stand-in gave no answer ({self._process.returncode}):\n{said}"
        )

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        for file in (self._process.stdin, self._answers, self._output):
            file.close()


_child: Child | None = None


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Have a test of this folder run in the child, and report what the child reports."""
    if IN_CHILD or not item.path.is_relative_to(HERE) or _has_its_gpu(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _has_its_gpu(item: pytest.Item) -> bool:
    import torch

    return item.get_closest_marker("gpu") is not None and torch.cuda.is_available()


def _reports(item: pytest.Item) -> list[pytest.TestReport]:
    global _child

    def one(outcome: Any, longrepr: Any) -> list[pytest.TestReport]:
        keywords = dict.fromkeys(item.keywords, 1)
        return [pytest.TestReport(item.nodeid, item.location, keywords, outcome, longrepr, "call")]

    try:
        _child = _child or Child(library())
        found = _child.run(item.nodeid)
    except CannotBuild as error:
        return one("skipped", (str(item.path), 0, f"Skipped: {error}"))
    except RuntimeError as error:
        _child = None  # the next test gets another
        return one("failed", str(error))
    hook = item.config.hook
    reports = [hook.pytest_report_from_serializable(config=item.config, data=data) for data in found]
    for report in reports:
        if isinstance(report.longrepr, list):  # JSON has no tuples, and the reason of a skip must be one
            report.longrepr = tuple(report.longrepr)
    return reports


def pytest_unconfigure() -> None:
    if _child is not None:
        _child.end()


def _left(device: ModuleType) -> list[int]:
    """Return the bytes that tensors take on each device.

    The engine's thread of a device lets go of its last node after backward has returned, so this looks again
    for at most two seconds.
    """
    left: list[int] = []

    def nothing() -> bool:
        gc.collect()
        left[:] = [device.live(index) for index in range(device.device_count())]
        return not any(left)

    with contextlib.suppress(NotInTime):
        until(nothing, 2)
    return left


@pytest.fixture
def gpu() -> Iterator[ModuleType]:
    """Return the stand-in: `live(i)`, `peak(i)`, `reset_peak(i)`, `set_limit(i, nbytes)`, `take_races()`, ...

    A test that uses the stand-in fails if some work did not wait for other work that it relies on, and if it
    leaves tensors on a device: plans of later tests would count them. It begins with its own peaks: a counter
    that stands higher shows none of them. Plans move to the host only where a test says so, and waits for
    copies are not timed: the link is a copy on a CPU, and what it carries depends on the load.
    """
    import torch

    if not IN_CHILD:
        yield torch.cuda
        return
    from ac_client.planning.facts import host_budget
    from autoac.tape.runtime.moves import copies
    from standin.child import device

    device.take_races()
    for index in range(device.device_count()):
        device.reset_peak(index)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(host_budget, "LEAST_BYTES_PER_US", math.inf)
        monkeypatch.setattr(copies.stalls, "watch", lambda: None)
        yield device
    device.set_workspace(0)
    for index in range(device.device_count()):
        device.set_stream(0, index)  # torch.cuda.graph leaves that of a capture that failed
    left = _left(device)
    torch.cuda.empty_cache()  # pools of graphs that are gone: with any, workspaces are not freed
    races = device.take_races()
    for index in range(device.device_count()):
        device.set_limit(index, 1 << 50)
        torch.cuda.set_per_process_memory_fraction(1.0, index)
    device.set_device(0)
    device.set_slack(0)
    device.set_reports(True)
    device.set_cudnn(0)
    torch.ops.standin.set_capability(9, 0)
    assert not races, "\n".join(races[:10])
    assert not any(left), f"the test leaves tensors on devices, in bytes: {left}"
