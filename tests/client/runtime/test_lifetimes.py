"""Test that memory is freed at once, without the garbage collector, however a step ends."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest
import torch
from stepping import EventLog, nothing_left, recomputed, scalar
from torch import Tensor

from autoac.tape.runtime.policy_context import active, save_recompute_policy
from benchmarks.models.modules import Transformer

BATCH = torch.randn(2, 8, 32)
OPS = 12_500  # at a frame of 84 bytes for each op, a stack of 1 MiB overflows


class Boom(Exception):
    """An exception of the user."""


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        raise Boom


@pytest.fixture
def model() -> Transformer:
    model = Transformer()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # so that a step creates no new gradients
    return model


def forward(model: Transformer) -> Tensor:
    with save_recompute_policy([torch.ops.aten.addmm]):
        return scalar(model(BATCH))


def warmed_up(model: Transformer) -> None:
    """Create the objects that are made once and stay, such as the Python objects of parameter storages."""
    forward(model).backward()
    with save_recompute_policy("recompute_all"):
        loss = scalar(model(BATCH))
    loss.backward()


def test_exception_in_forward_frees_everything(model: Transformer) -> None:
    warmed_up(model)
    with nothing_left():
        try:
            with save_recompute_policy("recompute_all"):
                hidden = model(BATCH)["hidden"]
                raise Boom
        except Boom:
            del hidden
    assert active.region is None
    assert torch._C._len_torch_dispatch_stack() == 0


def test_exception_in_backward_frees_everything(model: Transformer) -> None:
    warmed_up(model)
    with nothing_left():
        with save_recompute_policy("recompute_all"):
            x = BATCH
            for i, block in enumerate(model.blocks):
                x = block(x)
                if i == 0:
                    x = Raises.apply(x)
            loss = scalar(x)
        del x
        try:
            loss.backward()
        except Boom:
            pass
        del loss


def test_partial_backward_frees_everything(model: Transformer) -> None:
    warmed_up(model)
    with nothing_left():
        loss = forward(model)
        loss.backward(inputs=[model.head.weight])
        del loss


def test_nothing_is_cached_between_two_passes(model: Transformer) -> None:
    log = EventLog()
    with save_recompute_policy("recompute_all", log=log):
        loss = scalar(model(BATCH))
    gc.collect()
    gc.disable()
    try:
        before = storages()
        loss.backward(inputs=[model.blocks[2].down.weight], retain_graph=True)
        assert storages() == before
        assert recomputed(log)
    finally:
        gc.enable()


def storages() -> int:
    return sum(type(o) is torch.UntypedStorage for o in gc.get_objects())


def test_saved_tensor_that_backward_does_not_need_is_not_held() -> None:
    with save_recompute_policy("must_save_all"):
        x = torch.randn(8, requires_grad=True)
        y = x + 1
        held = weakref.ref(y.untyped_storage())
        z = y + 1
        del y
        assert held() is None
    z.sum().backward()


def test_use_counts_stay_small_over_residual_adds() -> None:
    def seconds(adds: int) -> float:
        x = torch.randn(4, requires_grad=True)
        with save_recompute_policy("recompute_all"):
            y = x
            for _ in range(adds):
                y = y + y.sin()
        began = time.perf_counter()
        y.sum().backward()
        return time.perf_counter() - began

    seconds(8)
    assert seconds(1000) < 250 * max(seconds(8), 0.01)  # 2**1000 if every path were counted


@pytest.fixture
def small_stack() -> Iterator[Executor]:
    """Return a thread with 1 MiB of stack, an eighth of the main thread's."""
    before = threading.stack_size(1 << 20)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(int).result()  # the thread starts with its first call
        threading.stack_size(before)
        yield thread


def test_long_chain_of_ops_does_not_recurse(small_stack: Executor) -> None:
    def step() -> int:
        log = EventLog()
        x = torch.randn(2, requires_grad=True)
        with save_recompute_policy("recompute_all", log=log):
            y = x
            for _ in range(OPS):
                y = y.sin()
        y.sum().backward()
        del y
        return len(recomputed(log))

    assert small_stack.submit(step).result() == OPS - 1


def test_worked_example_of_the_region() -> None:
    """Check the tables at the head of tape/runtime/region.py."""
    x, w, v = (torch.randn(4, 4, requires_grad=True) for _ in range(3))
    log = EventLog()
    products = []

    def save_second_product(ctx: object, out: Tensor, op: object, *args: object, **kwargs: object) -> bool:
        if op is torch.ops.aten.mm.default:
            products.append(out)
        return len(products) == 2 and out is products[-1]

    with save_recompute_policy(save_second_product, log=log):
        h = x @ w
        r = h.relu()
        o = r @ v
        y = o.sin()
    products.clear()
    node_of_relu = r.grad_fn
    handle = node_of_relu._raw_saved_result.data  # type: ignore[attr-defined]
    version_r = handle._version
    (version_h,) = version_r.node.reads
    assert (version_r.uses, version_h.uses) == (2, 1)
    version_y = weakref.ref(y)
    del h, r, o, handle, version_r, version_h, node_of_relu
    y.sum().backward()
    assert log.events == [
        ("compute", "aten.mm.default"),
        ("compute", "aten.relu.default"),
        ("compute", "aten.mm.default"),
        ("compute", "aten.sin.default"),
        ("recompute", "aten.mm.default"),
        ("recompute", "aten.relu.default"),
    ]
    del y
    assert version_y() is None
