"""Test models whose own code checkpoints: a plan takes such calls over, or names them."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torchs
from blocks import Block
from checkpoints import in_torch, nested, ours, plainly, reentrant, same
from stepping import SeenOps, gradients, seeded, timed_by_flops
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ac_client
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import Policy, bounds, build, find_minimum_peak, plan
from autoac.planner.units import GIB
from autoac.profiler import DATASHEETS, CannotProfile, profile
from autoac.tape.checkpoints.own_checkpoints import checkpoints_are_plain, plain_checkpoints
from autoac.tape.torch_facts import private
from autoac.tape.unseen.ambient_state import AmbientState

by_name = torchs.checkpoint  # as libraries import it
NAMES = private.checkpoint_generator.__name__, "CheckpointFunction"
GENERATOR, FUNCTION = (getattr(torchs, name) for name in NAMES)
ENTER = torch.autograd.graph.saved_tensors_hooks.__enter__
LEFT_ALONE = ac_client.Constraints(take_over_checkpoints=False)


class Net(nn.Module):
    """Count how often the blocks run."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(functools.partial(self.counted, block), x)
        return {"loss": x.square().mean()}

    def counted(self, block: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        return block(x)


def sequential(function: Any, x: Tensor) -> Tensor:
    return torchs.checkpoint_sequential([function, torch.sin], 2, x, use_reentrant=False)  # type: ignore[no-any-return]


def of_remat(function: Any, x: Tensor) -> Tensor:
    remat = import_module("torch_remat")

    def body(x: Tensor) -> Tensor:
        return remat.region(torch.sin, "inside", recompute=True)(function(x))  # type: ignore[no-any-return]

    return remat.checkpoint(region_name="block")(body)(x)  # type: ignore[no-any-return]


def selective(function: Any, x: Tensor) -> Tensor:
    contexts = functools.partial(torchs.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    return by_name(lambda x: in_torch(function, x), x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


def by_policy(function: Any, x: Tensor) -> Tensor:
    """Save every second product, as torchtitan does."""
    counts = {False: 0, True: 0}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> torchs.CheckpointPolicy:
        counts[ctx.is_recompute] += op is torch.ops.aten.addmm.default
        saves = op is torch.ops.aten.addmm.default and counts[ctx.is_recompute] % 2
        return torchs.CheckpointPolicy.MUST_SAVE if saves else torchs.CheckpointPolicy.PREFER_RECOMPUTE

    wrapper = checkpoint_wrapper(
        function, context_fn=lambda: torchs.create_selective_checkpoint_contexts(policy)
    )
    return wrapper(x)  # type: ignore[no-any-return]


def in_context(function: Any, x: Tensor) -> Tensor:
    contexts = lambda: (SeenOps(), SeenOps())  # noqa: E731  # more than to decide
    return by_name(lambda x: in_torch(function, x), x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


def offloaded(function: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return plainly(function, x)


def with_sine(function: Any, x: Tensor) -> Tensor:
    return plainly(function, x).sin()


PLAIN = {sequential: with_sine, of_remat: with_sine}  # torch_remat alone draws other dropout masks again
HAS_REMAT = pytest.mark.skipif(find_spec("torch_remat") is None, reason="torch_remat is not installed")
REMAT = pytest.param(of_remat, marks=HAS_REMAT)
TAKEN = [in_torch, reentrant, nested, sequential, ours, selective, by_policy, REMAT]


def batch() -> Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(5))


def trained(model: nn.Module, steps: int = 2) -> list[Tensor]:
    """Return the gradients of the last of some steps."""
    return [gradients(model, batch(), dropout=number) for number in range(steps)][-1]


def tightest(model: nn.Module) -> Policy:
    found = timed_by_flops(profile(model, batch()))
    smallest = find_minimum_peak(found, gap=0.05, work_limit=0.3).found
    return plan(found, budget_bytes=smallest, gap=0.5, work_limit=0.3).policy()


@pytest.mark.parametrize("call", TAKEN, ids=lambda call: call.__name__)
def test_plan_decides_in_place_of_a_checkpoint(call: Callable[[Any, Tensor], Tensor]) -> None:
    policy = tightest(seeded(Net, call))
    model = ac_client.apply(seeded(Net, call), policy=policy, strict=True)
    found = trained(model)
    assert model.calls == 2 * len(model.blocks)  # backward runs no function again
    assert ac_client.applied(model).report().recomputed > 0
    assert same(found, trained(seeded(Net, PLAIN.get(call, plainly))))


@pytest.mark.parametrize("call", [in_torch, reentrant, ours, selective], ids=lambda call: call.__name__)
def test_tightest_plan_is_no_larger_than_the_checkpoint(call: Callable[[Any, Tensor], Tensor]) -> None:
    model, x = seeded(Net, call), batch()
    graph = build(timed_by_flops(profile(model, x)))
    smallest = find_minimum_peak(graph, gap=0.05).found
    with AllocatorTimeline(base=graph.static_bytes) as timeline:
        model(x)["loss"].backward()
    assert smallest <= timeline.peak_bytes
    assert bounds(graph).ceiling > timeline.peak_bytes  # which the checkpoint lowers


def wrapped(model: nn.Module) -> nn.Module:
    return nn.Sequential(*(checkpoint_wrapper(block) for block in model.children()))


def composable(model: nn.Module) -> nn.Module:
    for block in model.children():
        composable_checkpoint(block)
    return model


@pytest.mark.parametrize("change", [wrapped, composable], ids=lambda change: change.__name__)
def test_checkpoints_set_on_modules_are_taken_over(change: Callable[[nn.Module], nn.Module]) -> None:
    def blocks() -> nn.Module:
        return seeded(lambda: nn.Sequential(*(Block() for _ in range(3))))

    assert profile(change(blocks()), batch()).saved == profile(blocks(), batch()).saved
    policy = tightest(change(blocks()))
    planned = ac_client.apply(change(blocks()), policy=policy)
    assert same(gradients(planned, batch()), gradients(blocks(), batch()))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_reentrant_checkpoint_of_inputs_without_a_gradient_still_gives_none() -> None:
    class Front(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return super().forward(reentrant(self.first, x))

    planned = ac_client.apply(seeded(Front, in_torch), policy=tightest(seeded(Front, in_torch)))
    assert same(trained(planned, 1), trained(seeded(Front, in_torch), 1))


def test_checkpoints_are_left_alone_if_told_so() -> None:
    model = ac_client.apply(seeded(Net, in_torch), 1.0, constraints=LEFT_ALONE)
    assert same(trained(model), trained(seeded(Net, plainly)))
    calls = model.calls
    trained(model, 1)
    assert model.calls == calls + 2 * len(model.blocks)
    with pytest.raises(ValueError, match="take_over_checkpoints"):
        ac_client.Constraints(take_over_checkpoints=3)


def test_reentrant_checkpoints_that_are_left_alone_are_observed() -> None:
    model = ac_client.apply(seeded(Net, reentrant), 1.0, constraints=LEFT_ALONE)
    assert same(trained(model), trained(seeded(Net, reentrant)))
    found = profile(seeded(Net, reentrant), batch(), take_over_checkpoints=False)
    with AllocatorTimeline() as timeline:
        trained(seeded(Net, reentrant), 1)
    assert bounds(build(found)).ceiling == timeline.peak_bytes
    with pytest.raises(CannotProfile, match="use_reentrant"):
        profile(seeded(Net, reentrant), batch(), take_over_checkpoints=False, on=DATASHEETS["h100"])


@pytest.mark.parametrize(
    ("call", "name"), [(in_context, "context_fn"), (offloaded, "save_on_cpu")], ids=["context", "offload"]
)
def test_what_cannot_be_taken_over_is_named(
    call: Callable[[Any, Tensor], Tensor], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="ac_client"):
        model = ac_client.apply(seeded(Net, call), 1.0)
        assert same(trained(model), trained(seeded(Net, plainly)))
    assert [name in record.getMessage() for record in caplog.records] == [True]
    with pytest.raises(ac_client.InfeasibleBudget) as error:
        trained(ac_client.apply(seeded(Net, call), 30_000 / GIB))
    assert name in error.value.__notes__[0]


def test_checkpoint_with_other_contexts_is_carried_out_by_torch() -> None:
    model = ac_client.apply(seeded(Net, in_context), 1.0)
    trained(model, 1)
    calls = model.calls
    trained(model, 1)
    assert model.calls > calls + len(model.blocks)  # again in backward


def test_other_threads_and_models_keep_their_checkpoints() -> None:
    counts: list[int] = []

    def elsewhere() -> None:
        other = seeded(Net, in_torch)
        trained(other, 1)
        counts.append(other.calls)

    def call(function: Any, x: Tensor) -> Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return in_torch(function, x)

    model = ac_client.apply(seeded(Net, call), policy=tightest(seeded(Net, in_torch)))
    trained(model, 1)
    assert set(counts) == {2 * len(model.blocks)}
    elsewhere()
    assert counts[-1] == 2 * len(model.blocks)


def test_torch_is_restored_after_a_forward_that_raises() -> None:
    def call(function: Any, x: Tensor) -> Tensor:
        if fails:
            assert torchs.CheckpointFunction is not FUNCTION
            raise KeyError("user")
        return in_torch(function, x)

    fails = False
    model = ac_client.apply(seeded(Net, call), 1.0)
    trained(model, 1)
    fails = True
    with pytest.raises(KeyError, match="user"):
        trained(model, 1)
    assert torchs.CheckpointFunction is FUNCTION
    assert getattr(torchs, NAMES[0]) is GENERATOR
    assert torch.autograd.graph.saved_tensors_hooks.__enter__ is ENTER
    assert not checkpoints_are_plain()


def test_function_that_runs_again_takes_checkpoints_over() -> None:
    with plain_checkpoints():
        state = AmbientState(torch.device("cpu"))
    assert not checkpoints_are_plain()
    with state.restored():
        assert checkpoints_are_plain()
    with AmbientState(torch.device("cpu")).restored():
        assert not checkpoints_are_plain()
