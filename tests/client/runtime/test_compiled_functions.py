"""A compiled function in an eager model is one op of the plan, which backward runs again as a whole."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import stepping
import torch
import torch.distributed as dist
import torch.nn.functional as F
from stepping import EventLog, recomputed, smallest_found
from torch import Tensor, nn

import ac_client
from autoac.planner import Constraints
from autoac.planner.units import GIB
from autoac.profiler import profile
from autoac.tape.runtime.policy_context import save_recompute_policy
from autoac.tape.torch_facts import private

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # Warnings of torch itself when Inductor is loaded, and of Dynamo about an input that is not a leaf.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
INDUCTOR = pytest.param(
    "inductor",
    marks=pytest.mark.skipif(
        not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))),
        reason="Inductor's code for the CPU needs a C++ compiler",
    ),
)
BACKENDS = ["aot_eager", INDUCTOR]

Function = Callable[..., Any]


class Layer(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(32), nn.Parameter(torch.randn(32, 32) / 6)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_buffer("calls", torch.zeros(()))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        h = self.function(self.norm(x).sin(), self.weight, self.calls)
        return x + self.down(F.gelu(self.up(h)))


class Net(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(function) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mixed(x: Tensor, weight: Tensor, calls: Tensor) -> Tensor:
    return torch.softmax((x @ weight).exp().sin(), -1) * x


def dropped(x: Tensor, weight: Tensor, calls: Tensor) -> Tensor:
    return F.dropout((x @ weight).exp().sin(), 0.3)


def counted(x: Tensor, weight: Tensor, calls: Tensor) -> Tensor:
    calls += 1
    return (x @ weight).exp().sin() * calls


def trained(model: nn.Module) -> list[Tensor]:
    return [*stepping.trained(model, lambda _: torch.randn(8, 16, 32)), *model.buffers()]


def smallest(function: Function, constraints: Constraints | None = None) -> int:
    return smallest_found(lambda: trained(ac_client.apply(Net(function), 1e-6, constraints=constraints)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [mixed, dropped])
def test_compiled_function_is_recomputed_and_needs_no_more_than_its_ops(
    function: Function, backend: str
) -> None:
    compiled = torch.compile(function, backend=backend)
    least = smallest(compiled)
    saved = smallest(compiled, Constraints(pin_save=("layers.*/CompiledFunction",)))
    assert least <= 1.1 * smallest(function) < saved
    model = ac_client.apply(Net(compiled), 1.05 * least / GIB)
    assert all(map(torch.equal, trained(model), trained(Net(compiled))))
    policy = ac_client.applied(model).policy
    calls = [key for key in policy.decisions if "CompiledFunction" in key]
    assert len(calls) == 3
    everything = policy.model_copy(update={"decisions": dict.fromkeys(policy.decisions, "recompute")})
    again = ac_client.apply(Net(compiled), policy=everything)
    assert all(map(torch.equal, trained(again), trained(Net(compiled))))
    assert ac_client.applied(again).report().off_path == ""


@pytest.mark.skipif(
    not hasattr(torch._inductor.config, "wrap_inductor_compiled_regions"),
    reason="this torch wraps no regions",
)
@pytest.mark.parametrize("backend", [INDUCTOR])
@pytest.mark.parametrize(("function", "n_planned"), [(mixed, 3), (counted, 0)])
def test_compiled_function_whose_code_is_wrapped_is_planned_as_one_that_is_not(
    function: Function, n_planned: int, backend: str
) -> None:
    budget_gb = 1.06 * smallest(torch.compile(function, backend=backend)) / GIB  # follows measured times
    policies = []
    for wrapped in (False, True):
        torch._dynamo.reset()
        with torch._inductor.config.patch(wrap_inductor_compiled_regions=wrapped):
            compiled = torch.compile(function, backend=backend)
            model = ac_client.apply(Net(compiled), budget_gb)
            assert all(map(torch.equal, trained(model), trained(Net(compiled))))
        policies.append(ac_client.applied(model).policy)
    plain, policy = policies
    assert policy.predicted.save_all_peak_bytes == plain.predicted.save_all_peak_bytes
    assert policy.decisions.keys() == plain.decisions.keys()
    calls = [how for key, how in policy.decisions.items() if "CompiledFunction" in key]
    assert len(calls) == n_planned
    assert ("recompute" in calls) == bool(n_planned), calls


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_function_that_writes_a_buffer_is_saved(backend: str) -> None:
    compiled = torch.compile(counted, backend=backend)
    model = ac_client.apply(Net(compiled), 1.05 * smallest(compiled) / GIB)
    assert all(map(torch.equal, trained(model), trained(Net(compiled))))
    policy = ac_client.applied(model).policy
    assert "CompiledFunction" not in str(policy.decisions)


@pytest.mark.parametrize("backend", [INDUCTOR])
def test_compiled_function_that_is_a_captured_graph_is_saved(backend: str) -> None:
    compiled = torch.compile(mixed, backend=backend)
    want = trained(Net(compiled))
    for graph in gc.get_objects():
        if type(graph) is private.compiled_graph_class():
            graph.cudagraph_info = "of a GPU"  # without which torch captures nothing
    model = ac_client.apply(Net(compiled), 1.0)
    assert all(map(torch.equal, trained(model), want))
    plan = ac_client.applied(model).plan
    calls = [op for op in plan.graph.ops if "CompiledFunction" in op.name]
    assert {op.must_save for op in calls} == {"its kernels are a captured graph"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_function_that_communicates_is_saved(backend: str, tmp_path: Path) -> None:
    from torch.distributed import _functional_collectives as collectives

    def gathered(x: Tensor, weight: Tensor, calls: Tensor) -> Tensor:
        return collectives.all_gather_tensor_autograd((x @ weight).sin(), 0, dist.group.WORLD).exp()

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        found = profile(Net(torch.compile(gathered, backend=backend)), torch.randn(8, 16, 32))
    finally:
        dist.destroy_process_group()
    reasons = {
        found.reasons[reason]
        for key, reason in zip(found.keys(), found.ops.must_save, strict=True)
        if "CompiledFunction" in key
    }
    assert reasons == {"it communicates"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_function_gives_equal_gradients_twice_where_the_graph_is_retained(backend: str) -> None:
    x = torch.randn(8, 32, requires_grad=True)
    weight, calls = torch.randn(32, 32), torch.zeros(())
    with torch._functorch.config.patch(donated_buffer=False):
        compiled = torch.compile(mixed, backend=backend)

        def run(log: EventLog | None) -> list[Tensor]:
            with save_recompute_policy("recompute_all", log=log) if log is not None else nullcontext():
                out = compiled(x.sin(), weight, calls).exp().sum()
            return [torch.autograd.grad(out, x, retain_graph=first)[0] for first in (True, False)]

        log = EventLog()
        assert all(map(torch.equal, run(log), run(None)))
    assert "CompiledFunction" in recomputed(log)
