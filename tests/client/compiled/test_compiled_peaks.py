"""Test plans of compiled models: the peak to the byte, and the gradients of the unplanned model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from blocks import BlockNet
from stepping import allocated_peak, functions_of, outcome, peak_of, trained
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import ac_client
from autoac.planner import find_minimum_peak, plan
from autoac.profiler import profile
from autoac.profiler.joint_graph.joint_graph import JointGraph, simplify
from benchmarks.models.gpt2 import gpt2

BACKEND = "aot_eager"


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return gpt2(layers=1, width=32, heads=4, vocabulary=64, positions=32)


def rows() -> dict[str, Tensor]:
    return {"x": torch.randn(256, 32, generator=torch.Generator().manual_seed(1))}


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


net = partial(BlockNet, 3)
MODELS = {"MLP": (net, rows), "GPT-2": (language_model, tokens)}


@cache
def unplanned_outcome(make: Callable[[], nn.Module], batch: Callable[[], dict[str, Tensor]]) -> list[Tensor]:
    model = make()
    want = outcome(torch.compile(model, backend=BACKEND), **batch())
    torch.compiler.reset()
    return want


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]:
    return MODELS[request.param]


def test_predicted_peak_is_the_allocators_at_several_budgets(
    case: tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]],
) -> None:
    make, batch = case[0], case[1]()
    want = unplanned_outcome(*case)
    found = profile(torch.compile(make(), backend=BACKEND), **batch)
    lowest, highest = find_minimum_peak(found, gap=0.3, work_limit=1).found, plan(found, budget_gb=1).peak
    assert lowest < highest
    peaks = set()
    for share in (0.5, 0.0):
        budget = int(lowest + share * (highest - lowest))
        model = make()
        compiled = ac_client.apply(torch.compile(model, backend=BACKEND), budget / 2**30)
        got = outcome(compiled, **batch)
        assert all(map(torch.equal, got, want))
        predicted = ac_client.applied(compiled).policy.predicted  # type: ignore[union-attr]
        assert predicted.peak_bytes <= budget
        peaks.add(peak_of(compiled, **batch) + predicted.static_bytes - predicted.peak_bytes)
    assert peaks == {0}


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2.0).tanh().sum()


def test_number_takes_the_memory_that_it_takes_without_a_profile() -> None:
    batch = {"x": torch.randn(64, requires_grad=True)}
    want = profile(Scaled(), **batch).ops.workspace_nbytes
    compiled: Any = torch.compile(Scaled(), backend=BACKEND)
    found = [profile(compiled, **batch).ops.workspace_nbytes for _ in range(2)]
    assert want[0] > 0
    assert found == [want, want]


class Masked(nn.Module):
    """Two layers that compute the same mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * torch.exp(mask)
        return x.square().mean()


def test_what_two_layers_compute_alike_is_computed_and_saved_once() -> None:
    found = profile(torch.compile(Masked(), backend=BACKEND), **rows(), mask=torch.randn(256, 32))
    keys = found.keys()
    assert sum("aten.exp" in key for key in keys) == 1


def test_what_backward_computes_by_itself_is_not_saved() -> None:
    def joint(x: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().sin(), tangent * x.sin()

    graph = make_fx(joint)(torch.randn(2), torch.randn(2))
    simplify(graph, num_fwd_outputs=1)
    assert [node.name for node in JointGraph.of(graph.graph, 1).backward] == ["sin_2", "mul"]
    assert not any(node.kwargs for node in graph.graph.nodes)


def compiled_before(model: nn.Module, budget_gb: float) -> Any:
    return ac_client.apply(torch.compile(model, backend=BACKEND), budget_gb)


def compiled_after(model: nn.Module, budget_gb: float) -> Any:
    return torch.compile(ac_client.apply(model, budget_gb), backend=BACKEND)


def compiled_after_as_one_graph(model: nn.Module, budget_gb: float) -> Any:
    return torch.compile(ac_client.apply(model, budget_gb), backend=BACKEND, fullgraph=True)


def compiled_in_place_before(model: nn.Module, budget_gb: float) -> Any:
    model.compile(backend=BACKEND)
    return ac_client.apply(model, budget_gb)


def compiled_in_place_after(model: nn.Module, budget_gb: float) -> Any:
    ac_client.apply(model, budget_gb).compile(backend=BACKEND)
    return model


def compiled_after_a_step(model: nn.Module, budget_gb: float) -> Any:
    compiled = torch.compile(model, backend=BACKEND)
    statistics = model.statistics
    before = {name: buffer.clone() for name, buffer in statistics.named_buffers()}
    compiled(**rows()).backward()  # the graph is compiled without a plan
    statistics.load_state_dict(before, strict=False)
    return ac_client.apply(compiled, budget_gb)


ORDERS = functions_of(globals(), "model")


@pytest.mark.parametrize("order", ORDERS)
def test_compile_and_apply_work_in_either_order(order: Callable[[nn.Module, float], Any]) -> None:
    batch = rows()
    want = unplanned_outcome(net, rows)
    model = net()
    call = order(model, 0.6 * 1.1 / 1024)
    assert all(map(torch.equal, outcome(call, **batch), want))
    report = ac_client.applied(model).report()
    assert report.recomputed > 0
    predicted = ac_client.applied(model).policy.predicted  # type: ignore[union-attr]
    assert peak_of(call, **batch) + predicted.static_bytes == predicted.peak_bytes


@pytest.mark.parametrize("traced_before", [False, True])
def test_function_around_the_model_may_be_compiled(traced_before: bool) -> None:
    batch = rows()

    def train(model: nn.Module, *, planned: bool) -> tuple[list[Tensor], Any]:
        call = torch.compile(lambda x: model(x) * 2.0, backend=BACKEND)
        if planned and traced_before:
            call(**batch)
            model.load_state_dict(net().state_dict())
        if planned:
            ac_client.apply(model, 0.6 * 1.1 / 1024)
        return trained(model, lambda _: batch["x"], 1, call), call

    want, _ = train(net(), planned=False)
    model = net()
    got, call = train(model, planned=True)
    assert all(map(torch.equal, got, want))
    assert ac_client.applied(model).report().recomputed > 0
    predicted = ac_client.applied(model).policy.predicted  # type: ignore[union-attr]
    model.zero_grad()
    peak = allocated_peak(lambda: call(**batch).backward())
    assert peak + predicted.static_bytes == predicted.peak_bytes


def test_removed_plan_leaves_the_compiled_model_as_it_was() -> None:
    import torch._inductor.config as inductor

    batch, model = rows(), net()
    want = unplanned_outcome(net, rows)
    compiled = ac_client.apply(torch.compile(model, backend=BACKEND), 0.6 * 1.1 / 1024)
    partitioner = inductor.custom_partitioner_fn
    outcome(compiled, **batch)
    assert inductor.custom_partitioner_fn is partitioner
    ac_client.applied(compiled).remove()
    assert not model._forward_hooks
    model.load_state_dict(net().state_dict())
    assert all(map(torch.equal, outcome(compiled, **batch), want))


def checkpointed() -> nn.Module:
    """Return the same model with each block in torch's checkpoint."""
    model = net()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def test_plan_decides_for_torchs_checkpoints_in_compiled_code() -> None:
    batch = rows()
    want = unplanned_outcome(net, rows)
    plain = profile(torch.compile(net(), backend=BACKEND), **batch)
    lowest, highest = find_minimum_peak(plain, gap=0.3, work_limit=1).found, plan(plain, budget_gb=1).peak
    model = checkpointed()
    compiled = ac_client.apply(torch.compile(model, backend=BACKEND), (lowest + highest) / 2 / 2**30)
    assert all(map(torch.equal, outcome(compiled, **batch), want))
    predicted = ac_client.applied(model).policy.predicted  # type: ignore[union-attr]
    assert (predicted.save_all_peak_bytes, predicted.peak_bytes < highest) == (highest, True)
    assert peak_of(compiled, **batch) + predicted.static_bytes == predicted.peak_bytes


class Draws(nn.Module):
    """A layer after each of several ways to draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        draws: tuple[Callable[[Tensor], Tensor], ...] = (
            nn.functional.dropout,
            lambda y: nn.functional.alpha_dropout(y, training=True),
            lambda y: nn.functional.feature_alpha_dropout(y, training=True),
            lambda y: y * torch.rand_like(y),
            lambda y: y * torch.randn(y.shape, device=y.device),
            lambda y: y * torch.bernoulli(y.sigmoid()),
            lambda y: nn.functional.rrelu(y, training=True),
        )
        for layer, draw in zip(self.layers, draws, strict=True):
            x = draw(layer(x).sin()).exp().cos()
        return x.square().mean()


def test_random_numbers_are_drawn_again_in_backward() -> None:
    torch.manual_seed(0)
    plain = Draws()

    def trained(planned: bool) -> list[Tensor]:
        torch.compiler.reset()
        model = copy.deepcopy(plain)
        call = torch.compile(model, backend=BACKEND)
        if planned:
            call = ac_client.apply(call, lowest / 2**30)
            decisions = {}
        torch.manual_seed(2)
        loss = call(**rows())
        drawn = torch.rand(8)  # between forward and backward
        loss.backward()
        if planned:
            decisions = ac_client.applied(model).policy.decisions  # type: ignore[union-attr]
            states = [key for key in decisions if "rng_state" in key]
            assert len(states) == len(plain.layers)
            again = [key for key, decision in decisions.items() if decision == "recompute"]
            assert any(draw in key for key in again for draw in ("dropout", "rand", "bernoulli", "rrelu"))
        return [p.grad for p in model.parameters()] + [drawn, torch.rand(8)]  # type: ignore[misc]

    found = profile(torch.compile(plain, backend=BACKEND), **rows())
    lowest = find_minimum_peak(found, gap=0.05, work_limit=1).found
    want = trained(planned=False)
    assert all(map(torch.equal, trained(planned=True), want))


def test_dropout_needs_no_more_memory_compiled_than_eager() -> None:
    model, batch = language_model(), tokens()
    eager = find_minimum_peak(profile(model, **batch), work_limit=0.5).found
    compiled = profile(torch.compile(model, backend=BACKEND), **batch)
    assert find_minimum_peak(compiled, work_limit=0.5).found <= eager
