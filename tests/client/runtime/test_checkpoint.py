"""Compare `checkpoint` with torch's: the same results and errors. Count the ops that backward recomputes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stepping import nothing_left, scalar
from torch import Tensor, nn
from torch.utils import checkpoint as torchs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    noop_context_fn,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)

import ac_client
from ac_client import PolicyConflict, checkpoint, checkpoint_sequential, save_recompute_policy
from ac_client.measure.memory_timeline import AllocatorTimeline
from ac_client.runtime import nested_policies
from ac_client.runtime.policy_context import active
from ac_client.runtime.replay import EventLog
from benchmarks.fuzzers.nested_checkpoints import compare
from benchmarks.models.modules import Block, ConvNet, InPlace, Recurrent, Routed, Transformer, Views

MM = torch.ops.aten.mm.default
THEIRS = functools.partial(torchs.checkpoint, use_reentrant=False)


class Ops(TorchDispatchMode):
    """Count the ops that run inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def replayed(backward: Callable[[], Any], *names: str) -> list[int]:
    """Return how often `backward` ran each op of `names`. No derivative formula uses these ops."""
    with Ops() as ops:
        backward()
    return [ops.ran[name] for name in names]


def chain(x: Tensor, w: Tensor | None = None) -> Tensor:
    """Run exp, sin and tanh. Backward replays exp and sin, and needs the output of tanh itself."""
    y = x.exp().sin()
    return (y if w is None else y @ w).tanh()


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def same(got: Any, want: Any) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


@pytest.fixture
def x() -> Tensor:
    return leaf(4, 4)


@pytest.fixture
def w() -> Tensor:
    return leaf(4, 4, seed=1)


# Signatures


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint_sequential"])
def test_signature_has_every_parameter_of_the_function_of_torch(name: str) -> None:
    ours = inspect.signature(getattr(ac_client, name)).parameters
    for parameter in inspect.signature(getattr(torchs, name)).parameters.values():
        assert ours[parameter.name].kind is parameter.kind
        if parameter.name != "use_reentrant":
            assert ours[parameter.name].default is parameter.default
    assert ours["use_reentrant"].default is False
    assert name in ac_client.__all__


# What is recomputed


def test_backward_recomputes_what_it_needs_and_gives_the_plain_gradients(x: Tensor, w: Tensor) -> None:
    want = torch.autograd.grad(chain(x, w).sum(), (x, w))
    loss = checkpoint(chain, x, w).sum()
    got: list[Tensor] = []
    counts = replayed(lambda: got.extend(torch.autograd.grad(loss, (x, w))), "exp", "sin", "mm", "tanh")
    assert same(got, want)
    assert counts == [1, 1, 3, 1]  # two of the three mm are derivatives of the first


def test_input_of_the_last_op_is_not_recomputed_unless_its_derivative_reads_it(x: Tensor) -> None:
    loss = checkpoint(lambda t: t.exp().sin() + 1, x).sum()
    assert replayed(loss.backward, "exp", "sin") == [1, 0]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (lambda: Transformer(layers=2, width=64), (4, 64, 64)),
    "convolutions": (ConvNet, (16, 3, 8, 8)),
    "recurrent": (Recurrent, (16, 20, 8)),
    "routed": (Routed, (12, 16)),
    "in place": (lambda: InPlace(rows=512), (512, 16)),
    "views": (Views, (64, 8)),
}


def stepped(how: Callable[..., Any], model: str) -> tuple[list[Tensor], int]:
    """Return the gradients of one step with `how(module, batch)`, and the allocator's peak since forward."""
    make, shape = MODELS[model]
    torch.manual_seed(0)
    module, batch = make(), torch.randn(shape, requires_grad=True)
    with AllocatorTimeline() as timeline:
        scalar(how(module, batch)).backward()
    return [t.grad for t in (batch, *module.parameters()) if t.grad is not None], timeline.peak_bytes


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_plain_and_the_peak_is_at_most_that_of_torch(model: str) -> None:
    want, _ = stepped(lambda module, batch: module(batch), model)
    got, peak = stepped(checkpoint, model)
    _, theirs = stepped(THEIRS, model)
    assert same(got, want)
    assert peak <= theirs


class Stack(nn.Module):
    """Run each block by `how(block, x)`."""

    def __init__(self, how: Callable[..., Any], blocks: int = 6) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Block(64, 4, dropout=0.1) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.how(block, x)
        return x


def stack_peak(how: Callable[..., Any]) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    model, batch = Stack(how), torch.randn(4, 64, 64, requires_grad=True)
    with AllocatorTimeline() as timeline:
        model(batch).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None], timeline.peak_bytes


def test_checkpoint_around_every_block_peaks_far_below_the_plain_step() -> None:
    want, plain = stack_peak(lambda block, x: block(x))
    got, peak = stack_peak(checkpoint)
    _, theirs = stack_peak(THEIRS)
    assert same(got, want)
    assert peak <= theirs
    assert peak < plain / 2


def test_ops_whose_results_decide_are_saved_unless_a_policy_insists(x: Tensor) -> None:
    def f(t: Tensor) -> Tensor:
        return t.exp().where(t > 0, t).sin()

    insist = functools.partial(
        create_selective_checkpoint_contexts, lambda ctx, op, *a, **k: CheckpointPolicy.MUST_RECOMPUTE
    )
    assert replayed(checkpoint(f, x).sum().backward, "exp", "gt") == [1, 0]
    assert replayed(checkpoint(f, x, context_fn=insist).sum().backward, "exp", "gt") == [1, 1]


def test_forward_saves_the_inputs_and_no_intermediate_tensor(x: Tensor) -> None:
    inside: list[weakref.ref[Any]] = []

    def watched(t: Tensor) -> Tensor:
        y = t.exp()
        inside.append(weakref.ref(y.untyped_storage()))
        return y.sin()

    given = x * 2
    held = weakref.ref(given.untyped_storage())
    loss = checkpoint(watched, given).sum()
    del given
    assert inside[0]() is None
    assert held() is not None
    loss.backward()
    del loss
    assert held() is None


def test_dropped_loss_frees_everything(x: Tensor) -> None:
    x.grad = torch.zeros_like(x)
    checkpoint(chain, x).sum().backward()
    with nothing_left():
        checkpoint(chain, x).sum()
        checkpoint(chain, x).sum().backward()


# Arguments and outputs


def test_each_of_several_calls_in_one_graph_is_recomputed(x: Tensor) -> None:
    def twice(how: Callable[..., Tensor]) -> Tensor:
        return (how(chain, how(chain, x)) * how(chain, x)).sum()

    want = torch.autograd.grad(twice(lambda f, t: f(t)), x)
    loss = twice(checkpoint)
    got: list[Tensor] = []
    assert replayed(lambda: got.extend(torch.autograd.grad(loss, x)), "exp", "sin") == [3, 2 + 1]
    assert same(got, want)


def test_parameters_get_gradients_where_no_input_needs_one() -> None:
    linear, batch = nn.Linear(4, 4), torch.randn(3, 4)

    def f(t: Tensor) -> Tensor:
        return linear(t).exp().sin()

    want = torch.autograd.grad(f(batch).sum(), linear.parameters())
    loss = checkpoint(f, batch).sum()
    got: list[Tensor] = []
    assert replayed(lambda: got.extend(torch.autograd.grad(loss, linear.parameters())), "addmm") == [1]
    assert same(got, want)


def test_function_without_tensor_arguments(w: Tensor) -> None:
    def f(scale: float, name: str) -> Tensor:
        assert name == "a"
        return (w * scale).exp().sin()

    want = torch.autograd.grad(f(2.0, "a").sum(), w)
    loss = checkpoint(f, 2.0, name="a").sum()
    got: list[Tensor] = []
    assert replayed(lambda: got.extend(torch.autograd.grad(loss, w)), "exp") == [1]
    assert same(got, want)


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
    got: list[Tensor] = []
    assert replayed(lambda: got.extend(torch.autograd.grad(loss, (x, by))), "exp") == [1]
    assert same(got, want)


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


def test_exception_in_the_function_passes_and_removes_the_mode(x: Tensor) -> None:
    def fails(t: Tensor) -> Tensor:
        t.exp()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        checkpoint(fails, x)
    assert active.region is None
    assert torch._C._len_torch_dispatch_stack() == 0


def test_exception_in_the_function_frees_everything(x: Tensor) -> None:
    def fails(t: Tensor) -> Tensor:
        y = t.exp().sin()
        raise KeyError(y.shape)

    checkpoint(chain, x).sum()  # create objects that are made once and stay
    with nothing_left(), contextlib.suppress(KeyError):
        checkpoint(fails, x)


# Nesting and other policies


@pytest.mark.parametrize("depth", [2, 4])
def test_ops_of_nested_checkpoints_are_recomputed_once_for_each_level(x: Tensor, depth: int) -> None:
    def f(how: Callable[..., Tensor], level: int, t: Tensor) -> Tensor:
        y = t.neg().exp()
        y = (how(f, how, level - 1, y) if level > 1 else y).sin()
        return y * y

    want = torch.autograd.grad(f(lambda g, *args: g(*args), depth, x).sum(), x)
    for how in (checkpoint, THEIRS):
        loss = how(f, how, depth, x).sum()
        with Ops() as ops:
            got = torch.autograd.grad(loss, x)
        assert ops.ran["exp"] == ops.ran["sin"] == sum(range(depth + 1))
        assert same(got, want)


def test_checkpoint_around_checkpoints_peaks_as_low_as_that_of_torch() -> None:
    def pairs(outer: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
        return lambda block, x: outer(lambda t: inner(block, inner(block, t)), x)

    got, peak = stack_peak(pairs(checkpoint, checkpoint))
    want, outer_peak = stack_peak(pairs(checkpoint, lambda block, x: block(x)))
    _, theirs = stack_peak(pairs(THEIRS, THEIRS))
    assert same(got, want)
    assert peak <= theirs < outer_peak


NESTINGS = int(os.environ.get("AUTOAC_NESTINGS", "16"))


@pytest.mark.parametrize("first", range(0, NESTINGS, 4))
def test_random_nestings_have_the_plain_gradients_and_at_most_the_peak_of_torch(first: int) -> None:
    assert [one for one in map(compare, range(first, first + 4)) if not one.passes] == []


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


def test_must_save_all_around_a_checkpoint_saves_and_recompute_all_changes_nothing(x: Tensor) -> None:
    with save_recompute_policy("must_save_all"):
        saved = checkpoint(chain, x).sum()
    with save_recompute_policy("recompute_all"):
        remade = checkpoint(chain, x).sum()
    assert replayed(saved.backward, "exp", "sin") == [0, 0]
    assert replayed(remade.backward, "exp", "sin") == [1, 1]


def test_checkpoint_in_a_region_that_prefers_to_save_recomputes_only_its_own_ops(x: Tensor) -> None:
    log = EventLog()
    with save_recompute_policy(CheckpointPolicy.PREFER_SAVE, log=log):
        loss = checkpoint(lambda t: t.exp().sin(), x.cos()).tan().sum()
    want = torch.autograd.grad(x.cos().exp().sin().tan().sum(), x)
    assert same(torch.autograd.grad(loss, x), want)
    assert [name for kind, name in log.events if kind == "recompute"] == ["aten.exp.default"]


def test_policy_inside_a_checkpoint_can_insist_on_saving(x: Tensor) -> None:
    def f(t: Tensor) -> Tensor:
        with save_recompute_policy("must_save_all"):
            t = t.exp()
        return t.sin().square()

    assert replayed(checkpoint(f, x).sum().backward, "exp", "sin") == [0, 1]


def test_conflicting_selective_policies_are_an_error(x: Tensor, w: Tensor) -> None:
    def insist(word: CheckpointPolicy) -> Any:
        return functools.partial(create_selective_checkpoint_contexts, lambda ctx, op, *a, **k: word)

    def inner(t: Tensor) -> Tensor:
        return checkpoint(chain, t, w, context_fn=insist(CheckpointPolicy.MUST_RECOMPUTE))

    with pytest.raises(PolicyConflict):
        checkpoint(inner, x, context_fn=insist(CheckpointPolicy.MUST_SAVE))
    assert active.region is None


def test_checkpoint_of_torch_inside_ours_gives_the_plain_gradients(x: Tensor, w: Tensor) -> None:
    want = torch.autograd.grad(chain(chain(x, w).exp()).sum(), (x, w))
    loss = checkpoint(lambda t, v: chain(THEIRS(chain, t, v).exp()), x, w).sum()
    assert same(torch.autograd.grad(loss, (x, w)), want)


def test_our_checkpoint_inside_that_of_torch_gives_the_plain_gradients(x: Tensor, w: Tensor) -> None:
    want = torch.autograd.grad(chain(chain(x, w).exp()).sum(), (x, w))
    loss = THEIRS(lambda t, v: chain(checkpoint(chain, t, v).exp()), x, w).sum()
    assert same(torch.autograd.grad(loss, (x, w)), want)


# Every way to go backward


def test_grad_inside_the_function_and_backward_through_it(x: Tensor) -> None:
    def f(t: Tensor) -> Tensor:
        y = t.exp().sin()
        (g,) = torch.autograd.grad(y.cos().sum(), t, create_graph=True)
        return (g * y).tanh()

    want = torch.autograd.grad(f(x).sum(), x)
    with Ops() as ops:
        loss = checkpoint(f, x).sum()
    assert ops.ran["exp"] == 2  # the pass inside forward recomputes what it needs
    got: list[Tensor] = []
    (again,) = replayed(lambda: got.extend(torch.autograd.grad(loss, x)), "exp")
    assert again >= 1
    assert same(got, want)


def test_backward_inside_the_function_without_retaining_its_graph(x: Tensor, w: Tensor) -> None:
    def f(t: Tensor) -> Tensor:
        (t.exp().sin() * w).cos().sum().backward(inputs=[w])
        return t.cos().sin()

    f(x).sum().backward()
    want, x.grad, w.grad = (x.grad, w.grad), None, None
    with Ops() as ops:
        loss = checkpoint(f, x).sum()
    assert ops.ran["exp"] == 2
    assert torch.equal(w.grad, want[1])
    loss.backward()
    assert torch.equal(x.grad, want[0])
    assert torch.equal(w.grad, want[1]), "the backward inside must not run a second time"


def test_each_pass_with_retain_graph_recomputes_the_ops(x: Tensor) -> None:
    want = torch.autograd.grad(chain(x).sum(), x)
    loss = checkpoint(chain, x).sum()
    for retain in (True, True, False):
        got: list[Tensor] = []
        backward = functools.partial(torch.autograd.grad, loss, x, retain_graph=retain)
        counts = replayed(lambda got=got, backward=backward: got.extend(backward()), "exp")
        assert counts == [1]
        assert same(got, want)


def test_second_backward_without_retain_graph_raises_the_error_of_torch(x: Tensor) -> None:
    loss = checkpoint(chain, x).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_each_backward_pass_of_a_group_recomputes_its_own_ops(x: Tensor, w: Tensor) -> None:
    def halves(how: Callable[..., Any]) -> tuple[list[Tensor], list[int]]:
        a, b = how(lambda t, v: (t.exp().sin(), v.exp().sin()), x, w)
        got: list[Tensor] = []

        def both() -> None:
            with torchs.GraphExecGroup():
                got.extend(torch.autograd.grad(a.sum(), x))
                got.extend(torch.autograd.grad(b.sum(), w))

        return got, replayed(both, "exp")

    want, _ = halves(lambda f, *args: f(*args))
    got, counts = halves(checkpoint)
    assert same(got, want)
    assert counts == [2]


def test_partial_backward_recomputes_only_what_its_inputs_need(x: Tensor, w: Tensor) -> None:
    def f(t: Tensor, v: Tensor) -> Tensor:
        return t.exp().sin() + v.tan().cos()

    f(x, w).sum().backward()
    want, x.grad, w.grad = (x.grad, w.grad), None, None
    loss = checkpoint(f, x, w).sum()
    assert replayed(lambda: loss.backward(inputs=[w], retain_graph=True), "exp", "tan") == [0, 1]
    assert x.grad is None
    assert replayed(lambda: loss.backward(inputs=[x]), "exp", "tan") == [1, 0]
    assert same([x.grad, w.grad], want)


def test_each_pass_of_a_double_backward_recomputes_the_ops(x: Tensor) -> None:
    def second(y: Tensor) -> tuple[list[Tensor], list[int]]:
        got: list[Tensor] = []
        counts = replayed(
            lambda: got.extend(torch.autograd.grad(y.sum(), x, create_graph=True)), "exp"
        ) + replayed(lambda: got.extend(torch.autograd.grad(got[0].pow(2).sum(), x)), "exp")
        return got, counts

    want, nothing = second(chain(x))
    got, counts = second(checkpoint(chain, x))
    assert same(got, want)
    assert nothing == [0, 0]
    assert counts == [1, 1]


def test_gradcheck_and_gradgradcheck() -> None:
    x, w = leaf(3, 3, dtype=torch.double), leaf(3, 3, seed=1, dtype=torch.double)

    def f(t: Tensor, v: Tensor) -> Tensor:
        return checkpoint(lambda t: checkpoint(chain, t, v).exp(), t)

    assert torch.autograd.gradcheck(f, (x, w))
    assert torch.autograd.gradgradcheck(f, (x, w))


def test_custom_function_may_unpack_its_saved_tensors_twice(x: Tensor) -> None:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Tensor) -> Tensor:
            y = t.exp()
            ctx.save_for_backward(t, y)
            return y.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            first = ctx.saved_tensors[1].sum()
            return gradient * ctx.saved_tensors[1] * first / ctx.saved_tensors[1].sum()

    def f(t: Tensor) -> Tensor:
        return Exp.apply(t.sin().cos()).tan()

    want = torch.autograd.grad(f(x).sum(), x)
    loss = checkpoint(f, x).sum()
    got: list[Tensor] = []
    (exps,) = replayed(lambda: got.extend(torch.autograd.grad(loss, x)), "exp")
    assert exps >= 1
    assert same(got, want)
    with pytest.raises(torchs.CheckpointError, match="unpacked once"):
        THEIRS(f, x).sum().backward()


def test_input_written_after_forward_raises_the_error_of_torch(x: Tensor) -> None:
    given = x * 1
    loss = checkpoint(lambda t: t.exp().sin(), given).sum()
    with torch.no_grad():
        given.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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


def test_running_statistics_of_checkpointed_batch_norm_are_updated_once() -> None:
    def stepped(how: Callable[..., Tensor]) -> tuple[list[int], Tensor, Tensor]:
        norm, x = nn.BatchNorm1d(4), leaf(8, 4)
        loss = how(lambda t: norm(t.exp()).sin(), x).sum()
        counts = replayed(loss.backward, "native_batch_norm")
        return counts, norm.running_mean, norm.num_batches_tracked

    _, mean, batches = stepped(lambda f, x: f(x))
    counts, ours, our_batches = stepped(checkpoint)
    _, theirs, their_batches = stepped(THEIRS)
    assert counts == [1]
    assert torch.equal(ours, mean)
    assert our_batches == batches == 1
    assert not torch.equal(theirs, mean)
    assert their_batches == 2


def test_buffer_that_the_function_writes_is_written_once(x: Tensor) -> None:
    def f(buffer: Tensor, t: Tensor) -> Tensor:
        with torch.no_grad():
            buffer.add_(1)
        return (t * buffer).exp().sin()

    want = torch.autograd.grad(f(torch.zeros(4), x).sum(), x)
    buffer = torch.zeros(4)
    loss = checkpoint(f, buffer, x).sum()
    got: list[Tensor] = []
    assert replayed(lambda: got.extend(torch.autograd.grad(loss, x)), "exp") == [1]
    assert same(got, want)
    assert torch.equal(buffer, torch.ones(4))


@pytest.mark.parametrize("preserve", [True, False])
def test_dropout_is_the_same_for_each_preserve_rng_state(x: Tensor, preserve: bool) -> None:
    def f(t: Tensor) -> Tensor:
        return nn.functional.dropout(t.exp(), 0.5).sin()

    def stepped(how: Callable[..., Tensor]) -> tuple[Tensor, Tensor, int]:
        torch.manual_seed(3)
        loss = how(f, x).sum()
        torch.rand(7)
        got: list[Tensor] = []
        (draws,) = replayed(lambda: got.extend(torch.autograd.grad(loss, x)), "bernoulli_")
        return got[0], torch.get_rng_state(), draws

    want, state, nothing = stepped(lambda f, t: f(t))
    got, moved, draws = stepped(functools.partial(checkpoint, preserve_rng_state=preserve))
    assert torch.equal(got, want)
    assert torch.equal(moved, state)
    assert (nothing, draws) == (0, 1)


# Arguments about the second run of torch's checkpoint


@pytest.mark.parametrize("check", ["default", "none"])
@pytest.mark.parametrize("debug", [False, True])
def test_determinism_check_and_debug_change_nothing(x: Tensor, check: str, debug: bool) -> None:
    loss = checkpoint(chain, x, determinism_check=check, debug=debug).sum()
    assert replayed(loss.backward, "exp") == [1]


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
    with set_checkpoint_debug_enabled(True), pytest.raises(ValueError, match="debug"):
        checkpoint(chain, x, context_fn=lambda: noop_context_fn())
    with set_checkpoint_debug_enabled(False):
        checkpoint(chain, x, debug=True, context_fn=lambda: noop_context_fn())


@pytest.mark.parametrize("enabled", [True, False])
def test_recomputation_stops_early_for_each_early_stop(x: Tensor, enabled: bool) -> None:
    def f(t: Tensor) -> Tensor:
        return t.exp().sin() + 1

    with set_checkpoint_early_stop(enabled):
        loss = checkpoint(f, x, early_stop=enabled).sum()
    assert replayed(loss.backward, "exp", "sin") == [1, 0]


# Contexts


def selective(policy: Any, **kwargs: Any) -> Any:
    return functools.partial(create_selective_checkpoint_contexts, policy, **kwargs)


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
        got: list[Tensor] = []
        backward = functools.partial(torch.autograd.grad, loss, (x, w), retain_graph=retain)
        counts = replayed(lambda got=got, backward=backward: got.extend(backward()), "exp", "mm")
        assert counts == [1, 2]
        assert same(got, want)


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
    got: list[Tensor] = []
    assert replayed(lambda: got.extend(torch.autograd.grad(loss, x)), "mm") == [3]
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


# Inside a planned model


@pytest.mark.parametrize("taken_over", [True, False])
def test_checkpoint_in_a_planned_model_has_plain_gradients(taken_over: bool) -> None:
    class Model(nn.Module):
        def __init__(self, how: Callable[..., Any]) -> None:
            super().__init__()
            self.how = how
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.how(lambda t: self.linear(t).exp().sin(), x)
            return y.tanh()

    def gradients(how: Callable[..., Any], budget_gb: float | None) -> tuple[list[Tensor], list[int]]:
        torch.manual_seed(0)
        model = Model(how)
        if budget_gb is not None:
            ac_client.apply(model, budget_gb, take_over_checkpoints=taken_over)
        model(torch.ones(3, 4)).sum().backward()
        model.zero_grad()
        loss = model(torch.ones(3, 4)).sum()
        counts = replayed(loss.backward, "exp")
        return [p.grad for p in model.parameters()], counts

    want, _ = gradients(lambda f, t: f(t), None)
    got, counts = gradients(checkpoint, 1.0)
    assert same(got, want)
    assert counts == [0 if taken_over else 1]  # the plan has room for all


# Other ways of running


def test_use_reentrant_calls_the_checkpoint_of_torch(x: Tensor) -> None:
    y = checkpoint(chain, x, use_reentrant=True)
    assert type(y.grad_fn).__name__ == "CheckpointFunctionBackward"
    want = torch.autograd.grad(chain(x).sum(), x)[0]
    y.sum().backward()
    assert torch.equal(x.grad, want)


def test_use_reentrant_none_calls_torch_and_warns(x: Tensor) -> None:
    with pytest.warns(UserWarning, match="use_reentrant parameter should be passed explicitly"):
        y = checkpoint(chain, x, use_reentrant=None)
    assert type(y.grad_fn).__name__ == "CheckpointFunctionBackward"
    with pytest.warns(UserWarning, match="use_reentrant"):
        checkpoint_sequential([chain, chain], 2, x, use_reentrant=None)


def test_use_reentrant_defaults_to_false_without_a_warning(x: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert replayed(checkpoint(chain, x).sum().backward, "exp") == [1]


@pytest.mark.parametrize("context_fn", [noop_context_fn, selective([MM])], ids=["plain", "selective"])
def test_checkpoint_in_compiled_code_is_that_of_torch(x: Tensor, w: Tensor, context_fn: Any) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def compiled(t: Tensor, v: Tensor) -> Tensor:
        return checkpoint(chain, t, v, context_fn=context_fn).sum()

    want = torch.autograd.grad(chain(x, w).sum(), (x, w))
    assert same(torch.autograd.grad(compiled(x, w), (x, w)), want)
    assert "tag_activation_checkpoint" in graphs[0].code


@pytest.mark.parametrize("kind", ["function", "module", "module in place"])
def test_compiled_function_goes_to_the_checkpoint_of_torch(x: Tensor, kind: str) -> None:
    runs: list[int] = []

    def backend(graph: Any, example: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph.forward(*args)

        return run

    class Module(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            return chain(t)

    module = Module()
    compiled: Any = module
    if kind == "module in place":
        module.compile(backend=backend)
    else:
        compiled = torch.compile(chain if kind == "function" else module, backend=backend)
    checkpoint(compiled, x).sum().backward()
    assert len(runs) == 2


def test_make_fx_traces_the_recompute(x: Tensor) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def f(t: Tensor) -> Tensor:
        return torch.autograd.grad(checkpoint(chain, t).sum(), t)[0]

    traced = make_fx(f)(x)
    assert traced.code.count("ops.aten.exp.default") == 2
    other = leaf(4, 4, seed=5)
    assert torch.equal(traced(other), f(other))


def test_ops_on_meta_tensors_are_recomputed() -> None:
    t = torch.empty(4, 4, device="meta", requires_grad=True)
    loss = checkpoint(lambda t: nn.functional.dropout(t.exp(), 0.5).sin(), t).sum()
    assert replayed(loss.backward, "exp") == [1]
    assert t.grad.shape == (4, 4)
    assert t.grad.device.type == "meta"


def test_ops_on_fake_tensors_are_recomputed() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        t = torch.empty(4, 4, requires_grad=True)
        loss = checkpoint(chain, t).sum()
        assert replayed(loss.backward, "exp") == [1]
    assert isinstance(t.grad, FakeTensor)


def test_recompute_uses_the_default_device_and_dtype_of_forward(x: Tensor) -> None:
    def f(t: Tensor) -> Tensor:
        return (t.exp() * torch.full((4,), 3.0)).sin()

    with torch.device("meta"):
        t = torch.empty(4, requires_grad=True)
        loss = checkpoint(f, t).sum()
    assert replayed(loss.backward, "exp", "full") == [1, 1]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        want = torch.autograd.grad(f(x).sum(), x)
        loss = checkpoint(f, x).sum()
    finally:
        torch.set_default_dtype(default)
    assert same(torch.autograd.grad(loss, x), want)


def test_recompute_uses_the_autocast_of_forward(x: Tensor, w: Tensor) -> None:
    def f(t: Tensor, v: Tensor) -> Tensor:
        return (t.exp() @ v).sin().float()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = torch.autograd.grad(f(x, w).sum(), (x, w))
        loss = checkpoint(f, x, w).sum()
    got: list[Tensor] = []
    assert replayed(lambda: got.extend(torch.autograd.grad(loss, (x, w))), "exp") == [1]
    assert same(got, want)


def test_hooks_of_tensors_and_modules_run_once_and_in_order() -> None:
    def events(how: Callable[..., Tensor]) -> list[str]:
        seen: list[str] = []
        torch.manual_seed(0)
        linear, x = nn.Linear(4, 4), leaf(4, 4)

        def note(name: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                seen.append(name)

            return hook

        linear.register_forward_pre_hook(note("pre"))
        linear.register_forward_hook(note("post"))
        linear.register_full_backward_pre_hook(note("backward pre"))
        linear.register_full_backward_hook(note("backward"))
        linear.weight.register_post_accumulate_grad_hook(note("accumulated"))
        x.register_hook(note("input"))

        def f(t: Tensor) -> Tensor:
            y = t.exp()
            y.register_hook(note("inside"))
            return linear(y).sin()

        y = how(f, x)
        y.register_hook(note("output"))
        y.sum().backward()
        return seen

    want = events(lambda f, t: f(t))
    assert sorted(want) == sorted(
        ["pre", "post", "output", "backward pre", "backward", "accumulated", "inside", "input"]
    )
    assert events(checkpoint) == want


def test_saved_tensor_hooks_around_a_checkpoint_see_no_recomputed_tensor(x: Tensor) -> None:
    packed: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t)
    with hooks:
        loss = checkpoint(lambda t: t.exp().sin().cos(), x).sum()
    assert packed == []
    assert replayed(loss.backward, "exp") == [1]


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
    got: list[Tensor] = []
    assert replayed(lambda: got.extend(torch.autograd.grad(loss, x)), "exp") == [again]
    assert same(got, want)


def test_checkpoint_sequential_runs_a_sequential_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    x = leaf(3, 4)
    want = torch.autograd.grad(model(x).sum(), model.parameters())
    loss = checkpoint_sequential(model, 2, x, preserve_rng_state=False).sum()
    got: list[Tensor] = []
    assert replayed(lambda: got.extend(torch.autograd.grad(loss, model.parameters())), "addmm", "tanh") == [
        1,
        1,
    ]
    assert same(got, want)


def test_checkpoint_sequential_rejects_what_torch_rejects(x: Tensor) -> None:
    refused = "segments must be from 1 to the 1 functions", "must not be zero"
    for how, words in zip((checkpoint_sequential, torchs.checkpoint_sequential), refused, strict=True):
        with pytest.raises(ValueError, match="Unexpected keyword arguments: mode"):
            how([chain], 1, x, use_reentrant=False, mode=1)
        with pytest.raises(ValueError, match=words):
            how([chain], 2, x, use_reentrant=False)


def test_checkpoint_sequential_passes_use_reentrant_on(x: Tensor) -> None:
    seen = checkpoint_sequential([chain, lambda t: t.grad_fn], 2, x, use_reentrant=True)
    assert type(seen).__name__ == "CheckpointFunctionBackward"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_go_to_the_checkpoint_of_torch_with_the_same_peak() -> None:
    layers = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())])

    def run(how: Callable[..., Any]) -> tuple[list[Tensor], int]:
        rows = leaf(128, 64)
        with AllocatorTimeline() as timeline:
            ragged = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 40, 128]))
            how(layers, ragged).values().square().mean().backward()
        found = [rows.grad, *(p.grad for p in layers.parameters())]
        layers.zero_grad()
        return [g for g in found if g is not None], timeline.peak_bytes

    want, _ = run(lambda f, t: f(t))
    _, theirs = run(THEIRS)
    got, ours = run(checkpoint)
    assert same(got, want)
    assert ours == theirs


def doubled(layer: nn.Module, t: Tensor) -> Tensor:
    return layer(t) * 2


@pytest.mark.parametrize("way", ["module", "method", "closure", "partial"])
def test_modules_with_wrapped_parameters_go_to_the_checkpoint_of_torch(x: Tensor, way: str) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(TwoTensor(torch.eye(4), torch.eye(4)))
    calls: list[int] = []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    call = {
        "module": layer,
        "method": layer.__call__,
        "closure": lambda t: layer(t),
        "partial": functools.partial(doubled, layer),
    }[way]
    checkpoint(call, x).sum().backward()
    assert len(calls) == (
        1 if way == "partial" else 2
    )  # torch's checkpoint calls again; arguments of a partial are not inspected


def test_backwards_of_one_group_recompute_once(x: Tensor, w: Tensor) -> None:
    from torch.utils.checkpoint import GraphExecGroup

    def two(t: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        shared = t.detach().exp()
        return [(shared * a).sum(), (shared * b).sum()]

    weights = leaf(4, 4, seed=1), leaf(4, 4, seed=2)

    def backward(outs: list[Tensor]) -> None:
        got[:] = [torch.autograd.grad(y, v)[0] for y, v in zip(outs, weights, strict=True)]

    got: list[Tensor] = []
    backward(two(x, *weights))
    want = list(got)
    outs = checkpoint(two, x, *weights)
    with GraphExecGroup():
        assert replayed(lambda: backward(outs), "exp") == [1]
    assert same(got, want)
    del outs
    outs = checkpoint(two, x, *weights)
    assert replayed(lambda: backward(outs), "exp") == [2]


@pytest.mark.parametrize("word", ["MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"])
def test_offload_saves_with_one_warning(x: Tensor, word: str) -> None:
    nested_policies._warn_of_offload.cache_clear()

    def offload(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy[word]

    contexts = functools.partial(create_selective_checkpoint_contexts, offload)
    with pytest.warns(UserWarning, match="save_on_cpu") as caught:  # noqa: PT031
        y = checkpoint(chain, x, context_fn=contexts)
        with save_recompute_policy(CheckpointPolicy[word]):
            z = chain(x)
        with save_recompute_policy("recompute_all"):
            t = ac_client.tag(x.exp(), word.lower()).sin().tanh()
    assert len(caught) == 1
    assert replayed(y.sum().backward, "exp", "sin") == [0, 0]
    assert replayed(z.sum().backward, "exp", "sin") == [0, 0]
    assert replayed(t.sum().backward, "exp", "sin") == [0, 1]


def test_error_repeats_why_saved_tensor_hooks_are_disabled(x: Tensor) -> None:
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("the reason of somebody else"),
        pytest.raises(RuntimeError, match="the reason of somebody else"),
        save_recompute_policy("recompute_all"),
    ):
        pass
