"""Test models whose blocks are compiled one by one: one plan and one budget for compiled and eager parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from blocks import Block, BlockNet
from checkpoints import same
from stepping import allocated_peak, outcome, peak_of
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

import ac_client
from autoac.planner import build, find_minimum_peak, plan, plan_offload
from autoac.planner.problem.moves import Link, triggers
from autoac.planner.shared_code import MOST_VARIANTS
from autoac.profiler import DATASHEETS, profile

BACKEND = "aot_eager"


BATCH = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))


def in_place(model: BlockNet) -> None:
    for block in model.blocks:
        block.compile(backend=BACKEND)


def whole(model: BlockNet) -> None:
    model.compile(backend=BACKEND)


def wrapped(model: BlockNet) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=BACKEND)


def step(model: nn.Module) -> None:
    torch.manual_seed(2)
    model(BATCH).backward()


@pytest.mark.parametrize("compiled", [in_place, wrapped])
def test_peak_is_exact_and_gradients_are_the_same(compiled: Callable[[BlockNet], None]) -> None:
    plain = BlockNet()
    compiled(plain)
    want = outcome(plain, BATCH)
    other = BlockNet()
    compiled(other)
    found = profile(other, BATCH)
    lowest, highest = find_minimum_peak(found, gap=0.3, work_limit=1).found, plan(found, budget_gb=1).peak
    kinds: set[Any] = set()
    for share in (0.75, 0.4, 0.0):
        budget = int(lowest + share * (highest - lowest))
        model = BlockNet()
        compiled(model)
        ac_client.apply(model, budget / 2**30)
        assert all(map(torch.equal, outcome(model, BATCH), want))
        report = ac_client.applied(model).report()
        policy = ac_client.applied(model).policy
        assert not report.off_path
        kinds |= {key.startswith("blocks") for key, what in policy.decisions.items() if what != "save"}
        predicted = policy.predicted
        assert predicted.peak_bytes <= budget
        assert peak_of(model, BATCH) + predicted.static_bytes == predicted.peak_bytes
    assert kinds == {False, True}  # ops of both kinds are recomputed


def test_blocks_that_share_code_are_compiled_a_few_times() -> None:
    variants = []

    def forward(module: Any, _inputs: Any) -> Any:
        variants.append(module)
        return boxed_nop(module, _inputs)

    backend = aot_autograd(fw_compiler=forward, bw_compiler=boxed_nop)
    model = BlockNet(8)
    for block in model.blocks:
        block.compile(backend=backend)
    ac_client.apply(model, 1.25 / 1024)
    for _ in range(2):
        model.zero_grad()  # with gradients, the step would be planned again
        step(model)
    report = ac_client.applied(model).report()
    assert not report.off_path
    assert report.recomputed > 8
    assert 1 < len(variants) <= MOST_VARIANTS


def test_removed_plan_leaves_compiled_blocks_as_they_were() -> None:
    model = BlockNet()
    in_place(model)
    before = [block._compiled_call_impl for block in model.blocks]
    ac_client.apply(model, 1.0)
    step(model)
    ac_client.applied(model).remove()
    assert [block._compiled_call_impl for block in model.blocks] == before


def test_compiled_blocks_can_be_profiled_for_an_absent_device() -> None:
    model = BlockNet()
    in_place(model)
    real, fake = profile(model, BATCH), profile(model, BATCH, on=DATASHEETS["h100"])
    assert fake.keys() == real.keys()
    assert (fake.ops.flags, fake.ops.must_save) == (real.ops.flags, real.ops.must_save)


@pytest.mark.parametrize("compiled", [whole, in_place])
def test_compiled_autograd_gives_the_gradients_of_the_unplanned_model(
    compiled: Callable[[BlockNet], None],
) -> None:
    def gradients(planned: bool) -> list[Tensor | None]:
        torch.compiler.reset()
        model = BlockNet(1)
        compiled(model)
        if planned:
            ac_client.apply(model, 0.35 / 1024)
            step(model)
            model.zero_grad()

        def run() -> None:
            loss = model(BATCH)
            with compiled_autograd._enable(torch.compile(backend=BACKEND)):
                loss.backward()

        torch.manual_seed(2)
        peak = allocated_peak(run)
        if planned:
            assert ac_client.applied(model).report().recomputed > 0
            predicted = ac_client.applied(model).policy.predicted
            if compiled is whole:  # what eager ops save stays until a compiled backward ends
                assert peak + predicted.static_bytes == predicted.peak_bytes
        return [p.grad for p in model.parameters()]

    assert same(gradients(True), gradients(False))


@pytest.mark.parametrize("by_configuration", [False, True])
def test_compiled_autograd_around_the_profiled_forward(by_configuration: bool) -> None:
    def gradients(planned: bool) -> list[Tensor]:
        torch.compiler.reset()
        with torch._dynamo.config.patch(compiled_autograd=by_configuration):
            model = BlockNet(1)
            whole(model)
            if planned:
                ac_client.apply(model, 0.35 / 1024)
            around = compiled_autograd._enable(torch.compile(backend=BACKEND))
            with nullcontext() if by_configuration else around:
                found = outcome(model, BATCH)
        assert not planned or ac_client.applied(model).report().recomputed > 0
        return found

    assert all(map(torch.equal, gradients(True), gradients(False)))


class Gated(nn.Module):
    """A block whose layers are modules of torch, for which Dynamo has no code of its own up to torch 2.13."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.act(self.up(x)))))


@pytest.mark.parametrize("leaf", ["up", "act", "down"])
@pytest.mark.parametrize("after_apply", [False, True])
def test_leaves_that_are_compiled_by_themselves(leaf: str, after_apply: bool) -> None:
    def gradients(planned: bool) -> list[Tensor]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(Gated(), Gated(), Gated())
        leaves = [getattr(block, leaf) for block in model]
        for compiled in leaves if not after_apply else ():
            compiled.compile(backend=BACKEND)
        if planned:
            ac_client.apply(model, 1.24e6 / 2**30)  # since torch 2.14 Dynamo compiles these leaves
        for compiled in leaves if after_apply else ():
            compiled.compile(backend=BACKEND)
        for _ in range(2):
            model.zero_grad()
            model(BATCH).square().mean().backward()
        assert not planned or ac_client.applied(model).report().recomputed > 0
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    assert all(map(torch.equal, gradients(True), gradients(False)))


def test_eager_ops_are_not_fetched_at_points_of_a_compiled_end() -> None:
    """The code of both ends where the model's forward does."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    model[3].compile(backend=BACKEND)
    step = profile(model, BATCH, loss=lambda out: out.square().mean())
    graph = build(step)
    begins = triggers(graph)
    low, high = find_minimum_peak(step).found, plan(step, budget_bytes=1 << 40).peak
    compiled = set()
    for rate in (300.0, 1e3, 1e4):
        link = Link(rate, rate, 0.0, 1 << 40)
        for move in plan_offload(step, budget_bytes=(low + high) // 2, link=link).moves:
            assert move.fetch is not None
            assert graph.ops[begins[move.fetch]].compiled is graph.ops[move.op].compiled
            compiled.add(graph.ops[move.op].compiled)
    assert False in compiled


def test_blocks_that_share_code_move_nothing_to_the_host() -> None:
    """Each would be compiled for its own moves."""
    link = Link(1e6, 1e6, 0.0, 1 << 40)
    for blocks, moves in ((4, False), (1, True)):
        model = BlockNet(blocks)
        in_place(model)
        step = profile(model, BATCH)
        budget = (find_minimum_peak(step).found + plan(step, budget_bytes=1 << 40).peak) // 2
        found = plan_offload(step, budget_bytes=budget, link=link)
        assert bool(found.moves) is moves
        assert bool(found.why_unmoved) is not moves
