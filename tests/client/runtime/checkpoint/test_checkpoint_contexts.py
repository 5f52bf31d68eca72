"""Give a checkpoint contexts and selective policies: what they save, and what they may change."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checkpoints import MM, THEIRS, chain, graded, leaf, replayed, same, selective
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from ac_client import PolicyConflict, checkpoint, save_recompute_policy
from autoac.tape.runtime import nested_policies
from autoac.tape.runtime.policy_context import active
from autoac.tape.torch_facts import minor_version


def test_selective_checkpoint_releases_saved_tensors_that_only_recomputes_read(w: Tensor) -> None:
    def f(t: Tensor) -> Tensor:
        product = t @ w
        made.append(weakref.ref(product.untyped_storage()))
        return product.exp().sin()

    made: list[weakref.ref[Any]] = []
    alive: list[bool] = []
    x = leaf(4, 4)
    want = torch.autograd.grad(f(x).sum(), (x, w))
    for retain, expected in ((True, True), (False, False)):
        y = checkpoint(f, x, context_fn=selective([MM]))
        # In backward, `exp` is recomputed for `sin`, and then the gradient of `exp` arrives.
        y.grad_fn.next_functions[0][0].register_prehook(lambda _: alive.append(made[-1]() is not None))
        assert same(torch.autograd.grad(y.sum(), (x, w), retain_graph=retain), want)
        assert alive.pop() == expected


def test_two_backwards_share_an_op_of_a_selective_checkpoint(x: Tensor, w: Tensor) -> None:
    def two(t: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        shared = (t.detach() @ w.detach()).exp()
        return [(shared * a).sum(), (shared * b).sum()]

    weights = leaf(4, 4, seed=1), leaf(4, 4, seed=2)
    want = torch.autograd.grad(sum(two(x, *weights)), weights)
    outs = checkpoint(two, x, *weights, context_fn=selective([MM]))
    assert same([torch.autograd.grad(y, v)[0] for y, v in zip(outs, weights, strict=True)], want)


def test_conflicting_selective_policies_are_an_error(x: Tensor, w: Tensor) -> None:
    def insist(word: CheckpointPolicy) -> Any:
        return selective(lambda ctx, op, *a, **k: word)

    def inner(t: Tensor) -> Tensor:
        return checkpoint(chain, t, w, context_fn=insist(CheckpointPolicy.MUST_RECOMPUTE))

    with pytest.raises(PolicyConflict):
        checkpoint(inner, x, context_fn=insist(CheckpointPolicy.MUST_SAVE))
    assert active.region is None


@pytest.mark.parametrize(
    "policy",
    [
        [MM],
        lambda ctx, op, *args, **kwargs: op is MM,
        lambda ctx, op, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE if op is MM else CheckpointPolicy.PREFER_RECOMPUTE
        ),
    ],
    ids=["list", "bools", "policies"],
)
def test_selective_policy_saves_the_ops_that_it_names(x: Tensor, w: Tensor, policy: Any) -> None:
    def f(t: Tensor, v: Tensor) -> Tensor:
        return (t.exp() @ v).sin().cos()

    want = torch.autograd.grad(f(x, w).sum(), (x, w))
    loss = checkpoint(f, x, w, context_fn=selective(policy)).sum()
    for retain in (True, False):  # torch's checkpoint allows one backward only
        got, counts = graded(loss, (x, w), "exp", "mm", retain_graph=retain)
        assert counts == [1, 2]
        assert same(got, want)


@pytest.mark.skipif(minor_version() < (2, 13), reason="contexts have no op_output yet")
def test_selective_policy_sees_the_op_its_arguments_and_its_output(x: Tensor, w: Tensor) -> None:
    def asked(how: Callable[..., Tensor]) -> list[Any]:
        seen: list[Any] = []

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            out = ctx.op_output
            seen.append((op, len(args), kwargs, out.shape, out.dtype, out.device, ctx.is_recompute))
            return False

        how(lambda t, v: (t.exp() @ v).add_(1).sin(), x, w, context_fn=selective(policy)).sum().backward()
        return seen

    assert asked(checkpoint) == asked(THEIRS)


def test_selective_policy_with_an_invalid_op_raises_the_error_of_torch(x: Tensor) -> None:
    with pytest.raises(ValueError, match="OpOverload"):
        checkpoint(chain, x, context_fn=selective([torch.ops.aten.mm]))


def test_first_context_is_entered_around_forward_only(x: Tensor) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        seen.append("in")
        yield
        seen.append("out")

    def f(t: Tensor) -> Tensor:
        seen.append("run")
        return chain(t)

    loss = checkpoint(f, x, context_fn=lambda: (around(), contextlib.nullcontext())).sum()
    assert replayed(loss.backward, "exp") == [1]
    assert seen == ["in", "run", "out"]


def test_first_context_may_change_what_the_function_computes(x: Tensor) -> None:
    def contexts() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16), contextlib.nullcontext()

    def f(t: Tensor) -> Tensor:
        return (t @ t).float().sin()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = torch.autograd.grad(f(x).sum(), x)
    loss = checkpoint(f, x, context_fn=contexts).sum()
    got, counts = graded(loss, x, "mm")
    assert counts == [3]
    assert same(got, want)


def test_nontrivial_second_context_is_entered_by_the_checkpoint_of_torch(x: Tensor) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def around(name: str) -> Iterator[None]:
        seen.append(name)
        yield

    def f(t: Tensor) -> Tensor:
        seen.append("run")
        return chain(t)

    want = torch.autograd.grad(chain(x).sum(), x)
    made: list[int] = []

    def contexts() -> Any:
        made.append(1)
        return around("first"), around("second")

    loss = checkpoint(f, x, context_fn=contexts).sum()
    assert same(torch.autograd.grad(loss, x), want)
    assert seen == ["first", "run", "second", "run"]
    assert made == [1]


def test_first_context_that_swallows_an_exception_is_an_error(x: Tensor) -> None:
    def fails(t: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(RuntimeError, match="swallowed an exception") as raised:
        checkpoint(fails, x, context_fn=lambda: (contextlib.suppress(KeyError), contextlib.nullcontext()))
    assert isinstance(raised.value.__cause__, KeyError)
    assert active.region is None


@pytest.mark.parametrize("word", ["MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"])
def test_offload_saves_with_one_warning(x: Tensor, word: str) -> None:
    nested_policies._warn_of_offload.cache_clear()

    def offload(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy[word]

    with pytest.warns(UserWarning, match="save_on_cpu") as caught:  # noqa: PT031
        y = checkpoint(chain, x, context_fn=selective(offload))
        with save_recompute_policy(CheckpointPolicy[word]):
            z = chain(x)
    assert len(caught) == 1
    assert replayed(y.sum().backward, "exp", "sin") == [0, 0]
    assert replayed(z.sum().backward, "exp", "sin") == [0, 0]
