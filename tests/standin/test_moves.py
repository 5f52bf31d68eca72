"""Test moves to the host at the worst timing, and that each race which others published would be seen."""

from __future__ import annotations

import contextlib
import inspect
from types import ModuleType
from typing import Any

import pytest
import torch

from ac_client.runtime.moves import copies
from ac_client.runtime.moves.host_memory import HostMemory, host_memory
from autoac.profiler.torch_facts.streams import streams_seen
from benchmarks.fuzzers import moved_programs

SEEDS = range(6)


@pytest.fixture(autouse=True)
def one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_seen, "several", False)  # earlier tests ran on several


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_run_as_predicted(gpu: ModuleType, seed: int) -> None:
    assert moved_programs.tried(seed).differs == ""
    assert gpu.take_races() == []


def mutated(monkeypatch: pytest.MonkeyPatch, *edits: tuple[str, str]) -> None:
    """Run another text of copies.py in its place."""
    text = inspect.getsource(copies)
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    made: dict[str, Any] = {"__name__": copies.__name__}
    exec(compile(text, copies.__file__, "exec"), made)
    for owner in ("Departure", "HostCopy", "_Wait"):
        for name, function in vars(made[owner]).items():
            if inspect.isfunction(function):
                monkeypatch.setattr(getattr(copies, owner), name, function)


def races_of_programs(gpu: ModuleType, *, side: bool = False) -> list[str]:
    stream = torch.cuda.stream(torch.cuda.Stream()) if side else contextlib.nullcontext()
    found = []
    for seed in SEEDS:
        with stream:
            moved_programs.tried(seed)
        torch.cuda.synchronize()
        found += gpu.take_races()
    return found


def test_side_stream_as_the_stream_of_compute(gpu: ModuleType) -> None:
    assert races_of_programs(gpu, side=True) == []


MUTATIONS = {
    # a reload or a free that does not wait for the copy out (Megatron-LM#7398)
    "free without waiting": [
        ("        self._wait.now()\n        del self._tensor", "        del self._tensor")
    ],
    # what was waited for is read on another stream, or not waited for at all (TRL#7195)
    "use without waiting": [("        event, self._event = self._event, None\n", "        event = None\n")],
    "copy in over memory in use": [("            into.wait_event(compute.record_event())\n", "")],
    "copy out of what is not made yet": [("        out.wait_event(compute.record_event())\n", "")],
    # the current stream is looked up where a stream was entered (torchtitan#2581)
    "stream of compute looked up inside": [
        (
            "        out.wait_event(compute.record_event())\n",
            "        with out:\n            out.wait_event("
            "torch.accelerator.current_stream(device).record_event())\n",
        )
    ],
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_published_races_would_be_seen(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, mutation: str
) -> None:
    mutated(monkeypatch, *MUTATIONS[mutation])
    assert races_of_programs(gpu)


def test_stream_that_is_not_the_current_one_would_be_seen(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "            compute = torch.accelerator.current_stream(device)\n            into"
    mutated(monkeypatch, (text, text.replace("accelerator.current", "cuda.default")))
    assert races_of_programs(gpu, side=True)


def test_memory_of_the_host_that_is_reused_before_its_copy_would_be_seen(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published race of torchtune#1867: a chunk goes back while a copy reads it."""
    monkeypatch.setattr(copies, "host_memory", HostMemory())
    a, b = torch.ones(1 << 12, device="cuda"), torch.zeros(1 << 12, device="cuda")
    first = copies.Departure(a, "a", 0)
    copy = first.copy
    first.finish()
    del first
    target, wait = copy.fetch()
    del copy  # the runtime does this after the wait
    second = copies.Departure(b, "b", 0)
    assert "reads on the host, without waiting" in gpu.take_races()[0]
    wait()
    second.finish()
    del target, second
    gpu.take_races()


def test_tensors_that_are_never_unpacked_leave_nothing(gpu: ModuleType) -> None:
    """The published leak of TRL#5700: what backward never asks for stays."""
    before, alive = host_memory.used, gpu.live(0)
    for seed in SEEDS:
        moved_programs.tried(seed)
    assert (host_memory.used, gpu.live(0)) == (before, alive)
