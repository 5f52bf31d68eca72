"""Test compiled planned models in training loops: graph breaks, dynamic shapes, accumulation, evaluation."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from stepping import allocated_peak, binding_budget
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.exc import BackendCompilerFailed

import ac_client
from autoac.planner import Policy, Profile, build, find_minimum_peak, plan, plan_offload
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.moves import Link
from autoac.profiler import observe, profile
from autoac.profiler.steps.training_loop import Loop as LoopForm
from autoac.tape.runtime.moves.host_memory import host_memory

BACKEND = "aot_eager"
TIGHT_GB = 0.8 / 1024


class Net(nn.Module):
    """A chain of layers, with a graph break in the middle if `breaks`."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x)).exp()
        if self.breaks:
            torch._dynamo.graph_break()
        for layer in self.layers[3:]:
            x = torch.tanh(layer(x)).exp()
        return x.square().mean()


def batch(rows: int = 512, seed: int = 1) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


Loop = Callable[[nn.Module, Callable[[Tensor], Tensor]], list[Tensor]]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def one_step(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    call(batch()).backward()
    return gradients(model)


def accumulation(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    for seed in range(3):
        call(batch(seed=seed)).backward()
    return gradients(model)


def two_forwards(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    (call(batch(seed=1)) + call(batch(seed=2))).backward()
    return gradients(model)


def evaluation_between(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    call(batch()).backward()
    model.eval()
    with torch.no_grad():
        loss = call(batch(seed=3))
    model.train()
    call(batch(seed=2)).backward()
    return [*gradients(model), loss]


def retained_graph(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    loss = call(batch())
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def other_shapes(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    for rows in (512, 384, 512, 96):
        call(batch(rows)).backward()
    return gradients(model)


def optimizer(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(3):
        call(batch(seed=seed)).backward()
        sgd.step()
        sgd.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


LOOPS = [one_step, accumulation, two_forwards, evaluation_between, retained_graph, other_shapes, optimizer]


def run(
    loop: Loop,
    plan: bool,
    *,
    breaks: bool = False,
    policy: Policy | None = None,
    backend: str = BACKEND,
    **options: Any,
) -> list[Tensor]:
    torch.compiler.reset()
    model = Net(breaks=breaks)
    call = torch.compile(model, backend=backend, **options)
    if plan:
        ac_client.apply(model, None if policy else TIGHT_GB, policy=policy)
    results = loop(model, call)
    if plan and policy is None:
        assert ac_client.applied(model).report().recomputed > 0
    return results


@cache
def unplanned(loop: Loop, breaks: bool) -> list[Tensor]:
    return run(loop, plan=False, breaks=breaks)


def used_on_host() -> int:
    """Return what is moved now, without garbage of earlier tests; the host's peak begins there."""
    gc.collect()
    host_memory.peak = host_memory.used
    return host_memory.used


@pytest.mark.parametrize(
    ("loop", "breaks"),
    [
        *((loop, False) for loop in LOOPS),
        *((loop, True) for loop in (accumulation, two_forwards, retained_graph)),
    ],
)
def test_results_are_those_of_the_unplanned_compiled_model(loop: Loop, breaks: bool) -> None:
    want = unplanned(loop, breaks)
    assert all(map(torch.equal, run(loop, plan=True, breaks=breaks), want))


@pytest.mark.parametrize("loop", [one_step, other_shapes])
def test_dynamic_shapes(loop: Loop) -> None:
    want = run(loop, plan=False, breaks=False, dynamic=True)
    assert all(map(torch.equal, run(loop, plan=True, breaks=False, dynamic=True), want))


@pytest.mark.parametrize("breaks", [False, True])
def test_each_of_two_forwards_has_the_decisions_of_the_plan(breaks: bool) -> None:
    torch.compiler.reset()
    model, batches = Net(breaks=breaks), [batch(seed=1), batch(seed=2)]
    call = torch.compile(model, backend=BACKEND)
    step = observe(call, (batches[0],), {}, loop=LoopForm(forwards=2))
    budget = binding_budget(step, 0.3)
    found = plan(step, budget_bytes=budget)
    of_each = [set(decisions.values()) for decisions in found.policy().forwards]
    assert of_each == [{"save", "recompute"}] * 2
    ac_client.apply(model, policy=found.policy())

    def run_both() -> None:
        losses = [call(x) for x in batches]  # held until the end, as in the profile
        torch.autograd.backward(losses)

    run_both()
    model.zero_grad()
    assert allocated_peak(run_both) + found.graph.static_bytes == found.peak <= budget


# --- moves to the host ------------------------------------------------------------------------------------


@cache
def profiled(breaks: bool, backend: str) -> tuple[Profile, int, int]:
    """Return a profile with the smallest peak without moves, and that of saving everything."""
    torch.compiler.reset()
    step = profile(torch.compile(Net(breaks=breaks), backend=backend), batch())
    graph = build(step)
    return step, find_minimum_peak(step, work_limit=1).found, peak_bytes(graph, graph.everything)


def moving(share: float, *, breaks: bool = False, backend: str = BACKEND) -> Policy:
    """Return a policy that moves, at a share of the way from the smallest peak without moves to plain's."""
    step, low, high = profiled(breaks, backend)
    budget, link = low + round(share * (high - low)), Link(1e6, 1e6, 0.0, 1 << 40)
    found = plan_offload(step, budget_bytes=budget, link=link)
    assert found.moves
    assert found.peak <= budget
    return found.policy()


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("share", [-0.02, 0.0, 0.3])
def test_moves_have_the_predicted_peaks_of_device_and_host(share: float, breaks: bool) -> None:
    policy = moving(share, breaks=breaks)
    torch.compiler.reset()
    model, x = Net(breaks=breaks), batch()
    call = torch.compile(model, backend=BACKEND)
    ac_client.apply(model, policy=policy)
    call(x).backward()
    model.zero_grad()
    used = used_on_host()
    peak = allocated_peak(lambda: call(x).backward())
    assert peak + policy.predicted.static_bytes == policy.predicted.peak_bytes
    assert (host_memory.peak - used, host_memory.used) == (policy.predicted.moved_bytes, used)


@pytest.mark.parametrize(
    ("loop", "breaks"),
    [
        *((loop, False) for loop in LOOPS if loop is not other_shapes),
        *((loop, True) for loop in (accumulation, two_forwards, retained_graph)),
    ],
)
def test_results_with_moves_are_those_of_the_unplanned_compiled_model(loop: Loop, breaks: bool) -> None:
    want, policy = unplanned(loop, breaks), moving(0.1, breaks=breaks)
    used = used_on_host()
    assert all(map(torch.equal, run(loop, plan=True, breaks=breaks, policy=policy), want))
    assert host_memory.peak > used == host_memory.used


def test_forward_without_backward_leaves_nothing_on_the_host() -> None:
    def forward(_model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [call(batch()).detach()]

    policy = moving(0.1)
    used = used_on_host()
    run(forward, plan=True, policy=policy)
    assert host_memory.peak > used == host_memory.used


class Outputs(nn.Module):
    """Returns what backward needs, besides the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = [x]
        for layer in self.layers:
            hidden.append(torch.tanh(layer(hidden[-1])).exp())
        return {"loss": hidden[-1].square().mean(), "hidden": tuple(hidden[1:])}


def test_outputs_that_move_are_returned() -> None:
    """A plan for a loop that drops them moves some."""

    def results(policy: Policy | None) -> list[Tensor]:
        torch.compiler.reset()
        model = Outputs()
        call = torch.compile(model, backend=BACKEND)
        if policy is not None:
            ac_client.apply(model, policy=policy)
        out = call(batch())
        hidden = [tensor.detach().clone() for tensor in out["hidden"]]
        out["loss"].backward()
        return hidden + gradients(model)

    step = profile(torch.compile(Outputs(), backend=BACKEND), batch(), loss=lambda out: out["loss"])
    step = step.with_dropped_outputs(step.droppable_outputs)
    graph = build(step)
    low, high = find_minimum_peak(step).found, peak_bytes(graph, graph.everything)
    link = Link(1e6, 1e6, 0.0, 1 << 40)
    found = plan_offload(step, budget_bytes=(4 * low + high) // 5, link=link)
    assert any("exp" in graph.ops[op].name for op in found.moved)
    assert all(map(torch.equal, results(found.policy()), results(None)))


def test_hook_that_copies_what_moves_is_refused() -> None:
    policy = moving(0.1)

    def hooked(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
            loss = call(batch())
        with pytest.raises(RuntimeError, match="remove the saved-tensor hooks that copy tensors"):
            loss.backward()
        return []

    run(hooked, plan=True, policy=policy)


def test_moves_under_compiled_autograd_raise() -> None:
    def step(_model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with (
            compiled_autograd._enable(torch.compile(backend=BACKEND)),
            pytest.raises(BackendCompilerFailed, match="autoac::arrive"),
        ):
            call(batch()).backward()
        return []

    run(step, plan=True, policy=moving(0.1))


def test_inductor_moves() -> None:
    want, policy = run(one_step, plan=False, backend="inductor"), moving(0.1, backend="inductor")
    used = used_on_host()
    assert all(map(torch.equal, run(one_step, plan=True, policy=policy, backend="inductor"), want))
    assert host_memory.peak - used == policy.predicted.moved_bytes


def test_dynamic_shapes_move_nothing_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    want, policy = run(one_step, plan=False, dynamic=True), moving(0.1)
    used = used_on_host()
    assert all(map(torch.equal, run(one_step, plan=True, policy=policy, dynamic=True), want))
    assert host_memory.peak == used
    assert "a compiled graph of dynamic shapes, which moves nothing" in caplog.text
