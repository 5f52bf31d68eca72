"""Test that gradients, outputs, buffers and generators equal those of the plain step, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from awkward_modules import ConvNet, InPlace, OneBuffer, Views
from stepping import assert_same, step
from torch import nn

from autoac.tape.runtime.policy_context import save_recompute_policy
from autoac.tape.unseen.global_flags import current_flags
from benchmarks.models.modules import Recurrent, Routed, Transformer

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "transformer": (Transformer, lambda: ((torch.randn(2, 8, 32, requires_grad=True),), {})),
    "transformer with nested keywords": (
        Transformer,
        lambda: ((torch.randn(2, 8, 32),), {"scale": {"by": torch.randn(32, requires_grad=True)}}),
    ),
    "convolutions": (ConvNet, lambda: ((torch.randn(4, 3, 8, 8, requires_grad=True),), {})),
    "recurrent": (Recurrent, lambda: ((torch.randn(2, 5, 8),), {})),
    "weights in one buffer": (OneBuffer, lambda: ((torch.randn(4, 16, requires_grad=True),), {})),
    "routed": (Routed, lambda: ((torch.randn(12, 16, requires_grad=True),), {})),
    "in place": (InPlace, lambda: ((torch.randn(4, 16, requires_grad=True),), {})),
    "views": (Views, lambda: ((torch.randn(4, 8, requires_grad=True),), {})),
}


def coin(seed: int, probability: float) -> Callable[..., bool]:
    chance = random.Random(seed)
    return lambda ctx, out, op, *args, **kwargs: chance.random() < probability


POLICIES = {
    "recompute all": lambda: "recompute_all",
    "save all": lambda: "must_save_all",
    "save matmuls": lambda: [torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.convolution],
    **{f"random {seed}": (lambda seed=seed: coin(seed, 0.2 + 0.1 * seed)) for seed in range(7)},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES)
def test_policy_changes_no_bit(case: str, policy: str) -> None:
    make, batch = CASES[case]
    torch.manual_seed(5)
    args, kwargs = batch()
    plain = step(make, *args, **kwargs)
    planned = step(make, *args, policy=POLICIES[policy](), **kwargs)
    assert_same(plain, planned)
    if policy == "recompute all":
        assert planned.recomputed(), "nothing was recomputed, so nothing was tested"


@pytest.mark.parametrize(("dtype", "cached"), [(torch.bfloat16, True), (torch.float16, False)])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_in_forward_and_around_backward(
    dtype: torch.dtype, cached: bool, backward_inside: bool
) -> None:
    x = torch.randn(2, 8, 32, requires_grad=True)

    def backward(loss: torch.Tensor) -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=backward_inside):
            loss.backward()

    def around() -> Any:
        return torch.autocast("cpu", dtype=dtype, cache_enabled=cached)

    plain = step(Transformer, x, around=around, backward=backward)
    planned = step(Transformer, x, policy="recompute_all", around=around, backward=backward)
    assert_same(plain, planned)


class ReadsAutocast(torch.autograd.Function):
    """Compute by whether autocast is in force, as `torch.amp.custom_fwd` does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * (2 if torch.is_autocast_enabled("cpu") else 3)
        ctx.save_for_backward(y)
        return y.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y


def test_function_that_runs_again_sees_the_autocast_of_forward() -> None:
    def gradient(policy: str) -> torch.Tensor:
        x = torch.linspace(-1, 1, 8).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16), save_recompute_policy(policy):
            y = ReadsAutocast.apply(x.exp()).exp()  # type: ignore[no-untyped-call]
        return torch.autograd.grad(y.sum(), x)[0]

    assert torch.equal(gradient("recompute_all"), gradient("must_save_all"))


@torch.library.custom_op("tests::switches", mutates_args=())
def switches(x: torch.Tensor) -> torch.Tensor:
    """Return `x` plus a number that encodes the global flags in force."""
    found = (
        torch.backends.mkldnn.enabled,
        torch.backends.mkldnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )
    return x + sum(2**i for i, on in enumerate(found) if on)


switches.register_autograd(lambda _ctx, gradient: gradient)


@contextlib.contextmanager
def mkldnn(**flags: bool) -> Iterator[None]:
    before = torch.backends.mkldnn.set_flags(**flags)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(*before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SWITCHES: list[Callable[[], contextlib.AbstractContextManager[Any]]] = [
    functools.partial(mkldnn, _enabled=False),
    functools.partial(mkldnn, _deterministic=True),
    deterministic,
]


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("switched", SWITCHES)
def test_replay_uses_the_global_flags_of_forward(
    switched: Callable[[], contextlib.AbstractContextManager[Any]], within: bool
) -> None:
    around, inside = (contextlib.nullcontext, switched) if within else (switched, contextlib.nullcontext)
    x, w = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    with around(), save_recompute_policy("recompute_all"):
        with inside():
            made = switches(x).sin()
        y = made * w
        want = made.detach().clone()
    before = current_flags()
    (got,) = torch.autograd.grad(y.sum(), w)
    assert torch.equal(got, want)
    assert current_flags() == before
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


flips = iter(range(100))


@torch.library.custom_op("tests::unsteady_mask", mutates_args=())
def unsteady_mask(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x)) > next(flips)


def test_recomputed_mask_that_differs_is_an_error() -> None:
    x = torch.randn(6, requires_grad=True)
    with save_recompute_policy("recompute_all"):
        y = (x * 2)[unsteady_mask(x)].exp().sum()
    with pytest.raises(RuntimeError, match=r"aten.index.Tensor must return \[5\].*got \[4\]"):
        y.backward()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_workspace_that_a_replay_would_not_fill_is_saved() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        sparse = torch.eye(4).to_sparse_csr().requires_grad_()
        return torch.sparse.mm(sparse, x.exp(), "amax").sin()

    x = torch.randn(4, 4, requires_grad=True)
    (want,) = torch.autograd.grad(model(x).sum(), x)
    with save_recompute_policy("recompute_all"):
        y = model(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)


@pytest.mark.parametrize("both", [True, False])
def test_running_statistics_made_in_the_region_are_recomputed(both: bool) -> None:
    def model(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        mean = mean * 2
        if both:
            var = var * 2
        y = nn.functional.batch_norm(x.exp(), mean, var, training=True).sin()
        return y * mean.exp() * var.sin()

    def gradients(policy: str | None) -> list[torch.Tensor]:
        x, mean, var = torch.randn(6, 3, requires_grad=True), torch.ones(3), torch.ones(3)
        with save_recompute_policy(policy) if policy else contextlib.nullcontext():
            y = model(x, mean, var)
        return [*torch.autograd.grad(y.sum(), x), mean, var]

    torch.manual_seed(2)
    want = gradients(None)
    torch.manual_seed(2)
    assert all(map(torch.equal, gradients("recompute_all"), want))
