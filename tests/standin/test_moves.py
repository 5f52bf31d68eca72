"""Test moves to the host at the worst timing, and that each race which others published would be seen."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._functorch.config
from fuzzers import moved_programs
from stepping import EventLog, same_gradients
from torch import nn

import ac_client
from ac_client.planning.facts import host_budget, peak_watch
from autoac.planner import (
    InfeasibleBudget,
    Policy,
    build,
    find_minimum_peak,
    plan,
    plan_offload,
    plan_with_host,
)
from autoac.planner.formats.op_key import OpKey
from autoac.planner.formats.profile import LinkRates, Profile
from autoac.planner.plan import decided
from autoac.planner.problem.moves import Link, Move, with_moves
from autoac.planner.units import GIB
from autoac.profiler import link_of, observe, profile
from autoac.profiler.timing import link as link_timing
from autoac.tape.runtime.cursor import Cursor, Route
from autoac.tape.runtime.moves import copies
from autoac.tape.runtime.moves.host_memory import host_memory
from autoac.tape.runtime.nodes import NodeVersion
from autoac.tape.runtime.policy_context import save_recompute_policy
from autoac.tape.runtime.replay import Pass
from autoac.tape.torch_facts.streams import streams_seen
from benchmarks.models.gpt2 import gpt2

SEEDS = range(6)
LEAST_BYTES_PER_US = host_budget.LEAST_BYTES_PER_US  # before the fixture `gpu` changes it


@pytest.fixture(autouse=True)
def one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_seen, "several", False)  # earlier tests ran on several


@pytest.mark.parametrize("seed", range(10, 20))
def test_random_programs_run_as_predicted_and_leave_nothing(gpu: ModuleType, seed: int) -> None:
    """Nor do tensors that backward never asks for stay, the published leak of TRL#5700."""
    before, alive = host_memory.used, gpu.live(0)
    assert moved_programs.tried(seed).differs == ""
    assert gpu.take_races() == []
    assert (host_memory.used, gpu.live(0)) == (before, alive)


def mutated(monkeypatch: pytest.MonkeyPatch, *edits: tuple[str, str]) -> dict[str, Any]:
    """Run another text of copies.py in its place; return its names."""
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
    return made


def races_of_programs(gpu: ModuleType, *, side: bool = False) -> Iterator[str]:
    stream = torch.cuda.stream(torch.cuda.Stream()) if side else contextlib.nullcontext()
    for seed in SEEDS:
        with stream:
            moved_programs.tried(seed)
        torch.cuda.synchronize()
        yield from gpu.take_races()


def test_side_stream_as_the_stream_of_compute(gpu: ModuleType) -> None:
    assert list(races_of_programs(gpu, side=True)) == []


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
    assert any(races_of_programs(gpu))


def test_stream_that_is_not_the_current_one_would_be_seen(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "            compute = torch.accelerator.current_stream(device)\n            into"
    mutated(monkeypatch, (text, text.replace("accelerator.current", "cuda.default")))
    assert any(races_of_programs(gpu, side=True))


@pytest.mark.parametrize("waits", [True, False])
def test_memory_of_the_host_is_reused_on_another_stream_after_the_copy_that_reads_it(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """The published race of torchtune#1867: a chunk goes back while a copy reads it."""
    if not waits:
        mutated(monkeypatch, ("        out.wait_stream(into)\n", ""))
    a = torch.ones(1 << 12, device="cuda")
    first = copies.Departure(a, "a", 0)
    copy = first.copy
    first.finish()
    target, wait = copy.fetch()
    wait()
    chunk = copy._chunk.data.data_ptr()
    del first, copy
    with torch.cuda.stream(torch.cuda.Stream()):
        b = torch.zeros(1 << 12, device="cuda")
        second = copies.Departure(b, "b", 0)
        assert second.copy._chunk.data.data_ptr() == chunk
        races = gpu.take_races()
        second.finish()
    torch.cuda.synchronize()
    gpu.take_races()
    del target, second
    assert [race for race in races if "reads on the host, without waiting" not in race] == []
    assert waits is (races == [])


@functools.cache
def plain(gpu: ModuleType, steps: int = 4, forwards: int = 1) -> tuple[list[float], int]:
    """Return the losses of plain training, and its last peak."""
    losses, peaks, _ = losses_and_peaks(gpu, steps, forwards=forwards)
    return losses, peaks[-1]


def losses_and_peaks(
    gpu: ModuleType, steps: int = 4, *, forwards: int = 1, **options: Any
) -> tuple[list[float], list[int], nn.Module]:
    """Train with so many forwards before each backward.

    Return the losses, and each step's peak beyond what there was before.
    """
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    model = gpt2(layers=6, width=64, heads=4, vocabulary=64, positions=64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options:
        ac_client.apply(model, optimizer=optimizer, **options)
    losses, peaks = [], []
    for step in range(steps):
        torch.manual_seed(step)
        batches = [torch.randint(0, 64, (16, 64), device="cuda") for _ in range(forwards)]
        torch.cuda.reset_peak_memory_stats()
        loss = torch.stack([model(input_ids=ids, labels=ids).loss for ids in batches]).sum()
        loss.backward()
        losses.append(loss.item())
        del loss
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert gpu.take_races() == []
    return losses, peaks, model


@pytest.mark.parametrize(
    "passed", [{"host_budget_gb": 1}, {"constraints": ac_client.Constraints(host_budget_bytes=GIB)}]
)
def test_host_budget_of_apply_is_measured_planned_and_kept(gpu: ModuleType, passed: dict[str, Any]) -> None:
    expected, most = plain(gpu)
    host_memory.peak = host_memory.used
    losses, peaks, model = losses_and_peaks(gpu, budget_gb=most * 0.5 / GIB, **passed)
    assert losses == expected
    constraints = ac_client.applied(model).policy.constraints
    assert constraints.host_budget_bytes == GIB
    report = ac_client.applied(model).report()
    assert max(peaks[2:]) <= report.predicted_peak_bytes <= most * 0.5
    assert host_memory.peak - host_memory.used == report.moved_bytes
    planned = ac_client.applied(model).plan
    assert planned.profile.link is not None
    assert planned.moves or planned.why_unmoved


def test_moves_with_two_forwards_before_a_backward(gpu: ModuleType) -> None:
    """Each forward moves what it makes, and backward fetches it in that forward's own part."""
    expected, most = plain(gpu, 4, forwards=2)
    options = {"budget_gb": most * 0.4 / GIB, "host_budget_gb": 1}
    losses, peaks, model = losses_and_peaks(gpu, 4, forwards=2, **options)
    assert losses == expected
    found = ac_client.applied(model).plan
    end, n = found.graph.forward_ends
    assert {move.op < end for move in found.moves} == {True, False}
    assert all(move.free <= (end if move.op < end else n) for move in found.moves)
    assert max(peaks[2:]) <= found.peak <= most * 0.4
    assert host_memory.used == 0


def test_plan_below_the_smallest_peak_of_recompute_alone_is_carried_out(gpu: ModuleType) -> None:
    torch.manual_seed(0)
    model = gpt2(layers=6, width=64, heads=4, vocabulary=64, positions=64).cuda()
    ids = torch.randint(0, 64, (16, 64), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = observe(model, (), {"input_ids": ids, "labels": ids}, optimizer=optimizer)
    step = step.with_dropped_outputs(step.droppable_outputs)
    low = find_minimum_peak(step).found
    budget = step.static.total + (low - step.static.total) * 96 // 100
    with pytest.raises(InfeasibleBudget):
        plan(step, budget_bytes=budget)
    planned = plan_offload(step, budget_bytes=budget, link=Link(20e3, 20e3, 1.0, GIB))
    del model, optimizer, ids
    expected, _ = plain(gpu)
    losses, peaks, _ = losses_and_peaks(gpu, policy=planned.policy())
    assert losses == expected
    assert peaks[-1] == planned.peak <= budget < low


def run_stage(gpu: ModuleType, n: int, policy: Policy | None) -> tuple[list[torch.Tensor], int]:
    """Run two steps of 2n microbatches, n of them in flight; return gradients and the last peak.

    The first backward of a plan compares contents, which takes some memory.
    """
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    model = gpt2(layers=4, width=64, heads=4, vocabulary=64, positions=64).cuda()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batches = [torch.randint(0, 64, (16, 64), device="cuda") for _ in range(2 * n)]
    if policy is not None:
        ac_client.apply(model, policy=policy, strict=True)
    outputs: dict[int, Any] = {}  # each held until its backward is over, as the profile assumes
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        for k in range(3 * n - 1):
            if k < 2 * n:
                outputs[k] = model(input_ids=batches[k], labels=batches[k])
            if k >= n - 1:
                outputs[k - n + 1].loss.backward()
                del outputs[k - n + 1]
    peak = torch.cuda.max_memory_allocated() - before
    assert gpu.take_races() == []
    batch_bytes = sum(ids.untyped_storage().nbytes() for ids in batches[n:])
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], peak - batch_bytes


def test_microbatches_of_a_stage_wait_on_the_host(gpu: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    """The stage holds three: what two of them moved is on the host while the third one runs."""
    n = 3
    torch.manual_seed(0)
    model = gpt2(layers=4, width=64, heads=4, vocabulary=64, positions=64).cuda()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(0, 64, (16, 64), device="cuda")
    rates = LinkRates(out_bytes_per_us=20e3, in_bytes_per_us=20e3, latency_us=0.0)
    step = profile(model, input_ids=ids, labels=ids)
    static = step.static.model_copy(update={"inputs": n * step.static.inputs})
    step = step.model_copy(update={"link": rates, "waiting_microbatches": n - 1, "static": static})
    low = find_minimum_peak(step, work_limit=1.0).found
    high = plan(step, budget_gb=1.0).peak
    budget = low + (high - low) // 3
    constraints = ac_client.Constraints(host_budget_bytes=GIB)
    planned = plan_with_host(step, budget_bytes=budget, constraints=constraints)
    alone = plan(step, budget_bytes=budget)
    assert planned.moves
    assert planned.extra_us < alone.extra_us
    del model, ids
    expected, _ = run_stage(gpu, n, None)
    host_memory.peak = host_memory.used
    gradients, peak = run_stage(gpu, n, planned.policy())
    assert all(map(torch.equal, gradients, expected))
    assert peak == planned.peak <= budget
    assert host_memory.peak - host_memory.used == n * planned.moved_bytes
    assert "ac_client" not in {record.name for record in caplog.records if record.levelname == "WARNING"}


armed: list[str] = []  # not empty: backward of `same` raises


@torch.library.custom_op("autoac_tests::may_fail", mutates_args=())
def may_fail(x: torch.Tensor) -> torch.Tensor:
    if armed:
        raise InterruptedError
    return x.clone()


@torch.library.custom_op("autoac_tests::same", mutates_args=())
def same(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


may_fail.register_fake(torch.empty_like)
same.register_fake(torch.empty_like)
same.register_autograd(lambda _, gradient: may_fail(gradient))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)).exp().sin()
            if i == 4:
                x = same(x)
        return x.square().mean()


def compiled_step(x: torch.Tensor) -> Profile:
    """Profile the compiled chain as if each op took 100 us: moves of a plan depend on times."""
    step = profile(torch.compile(Chain().cuda(), backend="aot_eager"), x)
    ops, backward = (
        table.model_copy(update={"runtime_us": (100.0,) * len(table)}) for table in (step.ops, step.backward)
    )
    return step.model_copy(update={"ops": ops, "backward": backward})


@pytest.mark.parametrize("mutation", ["none", "use without waiting"])
def test_compiled_code_waits_for_its_copies(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, mutation: str
) -> None:
    x = torch.randn(512, 64, device="cuda")
    plain = Chain().cuda()
    torch.compile(plain, backend="aot_eager")(x).backward()
    step = compiled_step(x)
    budget = (find_minimum_peak(step, work_limit=1.0).found + plan(step, budget_bytes=1 << 40).peak) // 2
    found = plan_offload(step, budget_bytes=budget, link=Link(1e6, 1e6, 0.0, 1 << 40))
    assert found.moves
    model = Chain().cuda()
    call = torch.compile(model, backend="aot_eager")
    ac_client.apply(model, policy=found.policy())
    call(x).backward()
    model.zero_grad()
    gpu.take_races()
    mutated(monkeypatch, *MUTATIONS.get(mutation, ()))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(x).backward()
    assert torch.cuda.max_memory_allocated() - before == found.peak - found.graph.static_bytes
    if mutation == "none":
        assert same_gradients(model, plain)
    assert bool(gpu.take_races()) is (mutation != "none")


@torch._functorch.config.patch(donated_buffer=False)  # or else torch refuses to retain the graph
def test_exception_between_fetch_and_arrival_in_compiled_code_races_with_nothing(gpu: ModuleType) -> None:
    x = torch.randn(512, 64, device="cuda")
    step = compiled_step(x)
    low, high = find_minimum_peak(step, work_limit=1.0).found, plan(step, budget_bytes=1 << 40).peak
    link = Link(300.0, 300.0, 0.0, 1 << 40)  # slow: fetches come long before they arrive
    found = plan_offload(step, budget_bytes=(low + high) // 2, link=link)
    assert found.moves
    call = torch.compile(ac_client.apply(Chain().cuda(), policy=found.policy()), backend="aot_eager")
    call(x).backward()
    loss = call(x)
    gpu.take_races()
    armed.append("now")
    try:
        with pytest.raises(InterruptedError):
            loss.backward(retain_graph=True)
    finally:
        armed.clear()
    torch.full((512, 64), 2.0, device="cuda")
    assert gpu.take_races() == []


@pytest.mark.parametrize("room_mib", [1000, 24, 2])
def test_link_is_measured_with_what_room_there_is(gpu: ModuleType, room_mib: int) -> None:
    link_timing._measured.cache_clear()
    gc.collect()
    torch.cuda.empty_cache()
    gpu.set_limit(0, torch.cuda.memory_reserved() + (room_mib << 20))
    rates = link_of(torch.device("cuda", 0))
    gpu.set_limit(0, 1 << 50)
    assert min(rates.out_bytes_per_us, rates.in_bytes_per_us) > 10
    gpu.take_races()


class Product(nn.Module):
    """Backward unpacks both factors in one step: they are outputs of two ops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x + 1) * x.neg()).sum()


@pytest.mark.parametrize("moved", [0, 1])
def test_compute_waits_at_the_unpack_and_not_at_the_end_of_the_unpacks_of_a_step(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    x = torch.randn(4096, device="cuda", requires_grad=True)
    step = observe(Product(), (x,), {})
    graph = build(step)
    j = next(step.id for step in graph.steps if len(step.unpacks) == 2)
    ops = [graph.versions[graph.saved_tensors[h].version].op for h in graph.steps[j].unpacks]
    moves, saved = [Move(ops[moved], graph.model_end, j)], graph.everything - set(ops)
    fields = decided(step, with_moves(graph, moves, Link(1.0, 1.0, 0.0, 1 << 60)), saved, moves)
    cursor, log = Cursor(Route(fields["decisions"], {}, fields["moves"], {})), EventLog()
    with save_recompute_policy(cursor, log=log):
        loss = Product()(x)

    def logged(running: Pass, versions: Iterable[NodeVersion]) -> None:
        for version in versions:
            if version.serial in running.arriving:
                log("wait", version.node.name)
        awaits(running, versions)

    awaits = Pass.await_arrival
    monkeypatch.setattr(Pass, "await_arrival", logged)
    loss.backward()
    of_move, other = (OpKey.parse(graph.ops[op].name).op for op in (ops[moved], ops[1 - moved]))
    unpacked = [("wait", of_move), ("recompute", other)]
    expected = [("recompute", of_move), *(unpacked if moved == 0 else unpacked[::-1])]
    assert [event for event in log.events if event[0] != "compute"] == expected


def set_link(monkeypatch: pytest.MonkeyPatch, gb_s: float) -> None:
    rates = LinkRates(out_bytes_per_us=1e3 * gb_s, in_bytes_per_us=1e3 * gb_s, latency_us=0.0)
    monkeypatch.setattr(host_budget, "link_of", lambda _: rates)
    monkeypatch.setattr(host_budget, "LEAST_BYTES_PER_US", LEAST_BYTES_PER_US)
    host_memory.release()


def test_moves_need_no_argument_and_nothing_stays_pinned_after_remove(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected, most), _ = plain(gpu), set_link(monkeypatch, 1e3)
    losses, _, model = losses_and_peaks(gpu, budget_gb=most / 2 / GIB)
    handle = ac_client.applied(model)
    assert losses == expected
    assert handle.report().moved_bytes > 0
    assert host_memory.reserved > 0
    handle.remove()
    assert (host_memory.used, host_memory.reserved) == (0, 0)
    losses, _, model = losses_and_peaks(gpu, budget_gb=most / 2 / GIB, host_budget_gb=0)
    assert losses == expected
    assert (ac_client.applied(model).report().moved_bytes, host_memory.reserved) == (0, 0)


@pytest.mark.parametrize("why", ["the link", "memory of the host cannot be pinned", "compute waits"])
def test_moves_stop_by_themselves(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    """Over a link of 7.9 GB/s, on a host that pins nothing, and where waits cost more than moves save."""
    steps = 7 if why == "compute waits" else 4
    expected, most = plain(gpu, steps)
    set_link(monkeypatch, 7.9 if why == "the link" else 1e3)
    if why.startswith("memory"):
        monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *_: 2)
    elif why == "compute waits":
        wait = "        stream.wait_event(event)\n        stream.record_event(end)\n"
        made = mutated(monkeypatch, (wait, f"        __import__('time').sleep(50e-3)\n{wait}"))
        monkeypatch.setattr(peak_watch, "stalls", made["stalls"])
    with caplog.at_level(logging.INFO, "ac_client"):
        losses, _, model = losses_and_peaks(gpu, steps, budget_gb=most / 2 / GIB)
    assert losses == expected
    assert caplog.text.count(f"nothing moves to the host, since {why}") == 1
    assert ac_client.applied(model).report().moved_bytes == 0
    assert why == "compute waits" or host_memory.reserved == 0
