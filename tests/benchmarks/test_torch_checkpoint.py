"""The predicted recomputes of torch's checkpoint are those that are counted in a real backward."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ac_client.demo.setting import TINY, block_paths, blocks, build_model, make_batch
from autoac.profiler import profile
from benchmarks.torch_checkpoint import SAVED_BY_SELECTIVE, replayed_ops, wrap_blocks

FORWARD_ONLY = (
    "aten.addmm.default",
    "aten.native_layer_norm.default",
    "aten.bernoulli_.float",
    "aten.tanh.default",
)


class Count(TorchDispatchMode):
    """Count calls of each op."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def observed():
    ids = make_batch(TINY)
    return profile(build_model(TINY), ids, labels=ids)


@pytest.mark.parametrize("baseline", ["checkpoint", "selective"])
def test_predicted_replays_equal_counted_ones(observed, baseline):
    predicted = Counter(
        observed.overloads[observed.ops.overload[op]]
        for op in replayed_ops(observed, block_paths(TINY), baseline)
    )
    model, ids = build_model(TINY), make_batch(TINY)
    wrap_blocks(blocks(model, TINY), baseline)
    loss = model(ids, labels=ids).loss
    with Count() as count:
        loss.backward()
    assert {op: count.calls[op] for op in FORWARD_ONLY} == {op: predicted[op] for op in FORWARD_ONLY}


def test_selective_replays_no_matmul(observed):
    replayed = replayed_ops(observed, block_paths(TINY), "selective")
    assert replayed
    assert not {observed.overloads[observed.ops.overload[op]] for op in replayed} & set(SAVED_BY_SELECTIVE)


def test_unknown_block_replays_nothing(observed):
    assert replayed_ops(observed, ["nowhere"], "checkpoint") == []


@pytest.mark.parametrize("baseline", ["checkpoint", "selective"])
def test_wrapped_blocks_have_the_gradients_of_plain(baseline):
    torch.manual_seed(3)
    model, ids = build_model(TINY), make_batch(TINY)
    torch.manual_seed(4)
    plain = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    wrap_blocks(blocks(model, TINY), baseline)
    torch.manual_seed(4)
    wrapped = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, wrapped, strict=True))
