"""Run a training step plainly and under a policy, and see everything that came of it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ac_client.replay import Log
from ac_client.runtime import save_recompute_policy


@dataclass
class Outcome:
    """All that a step leaves behind."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    input_gradients: list[Tensor | None]
    buffers: dict[str, Tensor]
    generator: Tensor
    log: Log

    def recomputed(self) -> list[str]:
        return [name for kind, name in self.log.events if kind == "recompute"]


def scalar(out: Any) -> Tensor:
    """Something to differentiate that depends on every differentiable output."""
    loss = getattr(out, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = tree_leaves(list(out.values()) if isinstance(out, dict) else out)
    floats = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack(
        [(t.float() * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum() for t in floats]
    ).sum()


def step(
    make: Callable[[], nn.Module],
    *args: Any,
    policy: Any = None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    backward: Callable[[Tensor], None] = lambda loss: loss.backward(),
    **kwargs: Any,
) -> Outcome:
    """One training step of a fresh model; `policy` None is the plain step."""
    torch.manual_seed(0)
    model = make()
    for t in tree_leaves((args, kwargs)):
        if isinstance(t, Tensor):
            t.grad = None
    torch.manual_seed(1)
    log = Log()
    region = save_recompute_policy(policy, log=log) if policy is not None else contextlib.nullcontext()
    with around(), region:
        out = model(*args, **kwargs)
    backward(scalar(out))
    return Outcome(
        [t.detach().clone() for t in tree_leaves(out) if isinstance(t, Tensor)],
        {name: p.grad for name, p in model.named_parameters()},
        [t.grad for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)],
        {name: b.clone() for name, b in model.named_buffers()},
        torch.get_rng_state(),
        log,
    )


def assert_same(plain: Outcome, planned: Outcome) -> None:
    """Outputs, gradients, buffers and the generator are equal, bit for bit."""

    def same(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        return a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))

    assert all(map(same, plain.outputs, planned.outputs)), "outputs differ"
    for name, gradient in plain.gradients.items():
        assert same(gradient, planned.gradients[name]), f"gradient of {name} differs"
    assert all(map(same, plain.input_gradients, planned.input_gradients)), "gradients of inputs differ"
    for name, buffer in plain.buffers.items():
        assert same(buffer, planned.buffers[name]), f"buffer {name} differs"
    assert torch.equal(plain.generator, planned.generator), "the generator moved"


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """What is made inside is gone at the end, without the garbage collector's help."""

    def alive() -> int:
        types = map(type, gc.get_objects())
        return sum(
            t is torch.UntypedStorage or t.__module__ in ("ac_client.nodes", "ac_client.replay")
            for t in types
        )

    gc.collect()
    gc.disable()
    try:
        before = alive()
        yield
        assert alive() == before, f"{alive() - before} storages, values or nodes are left"
    finally:
        gc.enable()
