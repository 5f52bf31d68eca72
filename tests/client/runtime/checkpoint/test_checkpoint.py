"""Compare `checkpoint` with torch's: the same results and errors. Count the ops that backward recomputes."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checkpoints import THEIRS, chain, graded, leaf, replayed, same, selective
from torch import Tensor, nn
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import CheckpointPolicy, noop_context_fn

import ac_client
from ac_client import checkpoint, checkpoint_sequential, save_recompute_policy
from autoac.tape.runtime.policy_context import active

# Signatures


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint_sequential"])
def test_signature_has_every_parameter_of_the_function_of_torch(name: str) -> None:
    ours = inspect.signature(getattr(ac_client, name)).parameters
    for parameter in inspect.signature(getattr(torchs, name)).parameters.values():
        assert ours[parameter.name].kind is parameter.kind
        if parameter.name not in ("use_reentrant", "function"):  # torch has a default for it since 2.14
            assert ours[parameter.name].default is parameter.default
    assert ours["use_reentrant"].default is False
    assert name in ac_client.__all__


def test_checkpoint_without_a_function_is_a_decorator(x: Tensor, w: Tensor) -> None:
    @checkpoint(preserve_rng_state=False)
    def decorated(x: Tensor, *, w: Tensor) -> Tensor:
        return chain(x, w)

    want = torch.autograd.grad(chain(x, w).sum(), (x, w))
    assert decorated.__name__ == "decorated"
    loss = decorated(x, w=w).sum()
    got, counts = graded(loss, (x, w), "exp", "sin")
    assert same(got, want)
    assert counts == [1, 1]


# What is recomputed


def test_backward_recomputes_what_it_needs_and_gives_the_plain_gradients(x: Tensor, w: Tensor) -> None:
    want = torch.autograd.grad(chain(x, w).sum(), (x, w))
    loss = checkpoint(chain, x, w).sum()
    got, counts = graded(loss, (x, w), "exp", "sin", "mm", "tanh")
    assert same(got, want)
    assert counts == [1, 1, 3, 1]  # two of the three mm are derivatives of the first


def test_ops_whose_results_decide_are_saved_unless_a_policy_insists(x: Tensor) -> None:
    def f(t: Tensor) -> Tensor:
        return t.exp().where(t > 0, t).sin()

    insist = selective(lambda ctx, op, *a, **k: CheckpointPolicy.MUST_RECOMPUTE)
    assert replayed(checkpoint(f, x).sum().backward, "exp", "gt") == [1, 0]
    assert replayed(checkpoint(f, x, context_fn=insist).sum().backward, "exp", "gt") == [1, 1]


# Arguments and outputs


def test_outputs_keep_their_structure_and_identity(x: Tensor) -> None:
    marker = object()

    def f(t: Tensor, *, extra: dict[str, list[Tensor]]) -> Any:
        y = t.exp() * extra["by"][0]
        return {"loss": y.sin(), "rest": (None, 3, [y.cos(), marker]), "given": t}

    by = leaf(4, 4, seed=2)
    plain = f(x, extra={"by": [by]})
    want = torch.autograd.grad(plain["loss"].sum() + plain["rest"][2][0].sum(), (x, by))
    out = checkpoint(f, x, extra={"by": [by]})
    assert out["rest"][:2] == (None, 3)
    assert out["rest"][2][1] is marker
    assert out["given"] is x
    loss = out["loss"].sum() + out["rest"][2][0].sum()
    got, counts = graded(loss, (x, by), "exp")
    assert same(got, want)
    assert counts == [1]


def test_output_that_is_a_view_of_an_input(x: Tensor) -> None:
    want = torch.autograd.grad((x[1:] * 2).exp().sum(), x)
    got = torch.autograd.grad((checkpoint(lambda t: t[1:], x) * 2).exp().sum(), x)
    assert same(got, want)


def test_without_grad_mode_no_context_is_entered(x: Tensor) -> None:
    made: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        made.append("entered")
        yield

    def contexts() -> Any:
        made.append("made")
        return context(), contextlib.nullcontext()

    with torch.no_grad():
        y = checkpoint(lambda t: (t.exp(), active.region), x, context_fn=contexts)
    assert y[0].grad_fn is None
    assert y[1] is None
    assert made == ["made"]


# Happens once, where torch does it twice


def test_side_effects_of_the_function_happen_once(x: Tensor) -> None:
    def calls(how: Callable[..., Tensor]) -> int:
        seen: list[int] = []

        def f(t: Tensor) -> Tensor:
            seen.append(1)
            return chain(t)

        how(f, x).sum().backward()
        return len(seen)

    assert calls(checkpoint) == 1
    assert calls(THEIRS) == 2


@pytest.mark.parametrize("preserve", [True, False])
def test_dropout_is_the_same_for_each_preserve_rng_state(x: Tensor, preserve: bool) -> None:
    def f(t: Tensor) -> Tensor:
        return nn.functional.dropout(t.exp(), 0.5).sin()

    def stepped(how: Callable[..., Tensor]) -> tuple[Tensor, Tensor, int]:
        torch.manual_seed(3)
        loss = how(f, x).sum()
        torch.rand(7)
        got, (draws,) = graded(loss, x, "bernoulli_")
        return got[0], torch.get_rng_state(), draws

    want, state, nothing = stepped(lambda f, t: f(t))
    got, moved, draws = stepped(functools.partial(checkpoint, preserve_rng_state=preserve))
    assert torch.equal(got, want)
    assert torch.equal(moved, state)
    assert (nothing, draws) == (0, 1)


# Arguments about the second run of torch's checkpoint


def test_function_that_would_take_another_branch_in_a_second_run_is_correct(x: Tensor) -> None:
    turns = iter([True, False])

    def f(t: Tensor) -> Tensor:
        return t.exp().sin() if next(turns) else t

    want = torch.autograd.grad(x.exp().sin().sum(), x)
    assert same(torch.autograd.grad(checkpoint(f, x).sum(), x), want)


BAD_CALLS: dict[str, dict[str, Any]] = {
    "unknown determinism_check": {"determinism_check": "strict"},
    "debug with context_fn": {"debug": True, "context_fn": lambda: noop_context_fn()},
    "reentrant with keywords": {"use_reentrant": True, "w": None},
    "reentrant with context_fn": {"use_reentrant": True, "context_fn": lambda: noop_context_fn()},
    "reentrant with debug": {"use_reentrant": True, "debug": True},
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_invalid_argument_raises_the_error_of_torch_before_the_function_runs(x: Tensor, case: str) -> None:
    def never(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("the function ran")

    raised: list[Exception] = []
    for how in (checkpoint, torchs.checkpoint):
        with pytest.raises(ValueError, match=r"determinism|debug|keyword") as caught:
            how(never, x, **{"use_reentrant": False, **BAD_CALLS[case]})
        raised.append(caught.value)
    assert str(raised[0]) == str(raised[1])


def test_global_debug_switch_of_torch_counts_as_debug(x: Tensor) -> None:
    with torchs.set_checkpoint_debug_enabled(True), pytest.raises(ValueError, match="debug"):
        checkpoint(chain, x, context_fn=lambda: noop_context_fn())
    with torchs.set_checkpoint_debug_enabled(False):
        checkpoint(chain, x, debug=True, context_fn=lambda: noop_context_fn())


@pytest.mark.parametrize("enabled", [True, False])
def test_recomputation_stops_early_for_each_early_stop(x: Tensor, enabled: bool) -> None:
    def f(t: Tensor) -> Tensor:
        return t.exp().sin() + 1

    with torchs.set_checkpoint_early_stop(enabled):
        loss = checkpoint(f, x, early_stop=enabled).sum()
    assert replayed(loss.backward, "exp", "sin") == [1, 0]


# checkpoint_sequential


@pytest.mark.parametrize("segments", [1, 2, 3, 5])
def test_every_segment_but_the_last_is_recomputed(x: Tensor, segments: int) -> None:
    def step(t: Tensor) -> Tensor:
        return t.exp().sin() * 1

    def plain(t: Tensor) -> Tensor:
        for _ in range(5):
            t = step(t)
        return t

    want = torch.autograd.grad(plain(x).sum(), x)
    loss = checkpoint_sequential([step] * 5, segments, x).sum()
    again = 5 // segments * (segments - 1)
    got, counts = graded(loss, x, "exp")
    assert same(got, want)
    assert counts == [again]


def test_checkpoint_sequential_runs_a_sequential_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    x = leaf(3, 4)
    want = torch.autograd.grad(model(x).sum(), model.parameters())
    loss = checkpoint_sequential(model, 2, x, preserve_rng_state=False).sum()
    got, counts = graded(loss, model.parameters(), "addmm", "tanh")
    assert same(got, want)
    assert counts == [1, 1]


def test_checkpoint_sequential_rejects_what_torch_rejects(x: Tensor) -> None:
    refused = "segments must be from 1 to 1, the number of functions", "must not be zero"
    for how, words in zip((checkpoint_sequential, torchs.checkpoint_sequential), refused, strict=True):
        with pytest.raises(ValueError, match="Unexpected keyword arguments: mode"):
            how([chain], 1, x, use_reentrant=False, mode=1)
        with pytest.raises(ValueError, match=words):
            how([chain], 2, x, use_reentrant=False)


def test_checkpoint_sequential_passes_use_reentrant_on(x: Tensor) -> None:
    seen = checkpoint_sequential([chain, lambda t: t.grad_fn], 2, x, use_reentrant=True)
    assert type(seen).__name__ == "CheckpointFunctionBackward"


def test_error_repeats_why_saved_tensor_hooks_are_disabled(x: Tensor) -> None:
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("the reason of somebody else"),
        pytest.raises(RuntimeError, match="the reason of somebody else"),
        save_recompute_policy("recompute_all"),
    ):
        pass
