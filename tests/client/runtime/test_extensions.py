"""Test custom functions and ops, parametrizations, transforms, subclasses, hooks, modes, compiled parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blocks import Body
from checkpoints import same
from stepping import (
    EventLog,
    SeenOps,
    assert_same,
    functions_of,
    nothing_left,
    policy_for,
    region_on,
    same_gradients,
    step,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

import ac_client
from autoac.planner import build, plan
from autoac.profiler import profile
from autoac.tape.runtime.policy_context import active, save_recompute_policy

F = nn.functional


class OldStyle(torch.autograd.Function):
    """Store a tensor as an attribute, and unpack twice."""

    @staticmethod
    def forward(ctx, x, w):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, w)
        ctx.y = x.detach().exp()
        return ctx.y * w

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        _, w = ctx.saved_tensors
        x, _ = ctx.saved_tensors
        return gradient * ctx.y * w + x * 0, gradient * ctx.y


class NewStyle(torch.autograd.Function):
    """Save an input and an output, return one output without a gradient, and have no second derivative."""

    @staticmethod
    def forward(x, w):  # type: ignore[no-untyped-def]
        return x.exp() * w, x.argmax()

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inputs[0], output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient, _):  # type: ignore[no-untyped-def]
        x, out = ctx.saved_tensors
        return gradient * out, gradient * x.exp()


class InPlace(torch.autograd.Function):
    """Write to the input, and save its contents before and after."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        before = x.clone()
        x.mul_(2).exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(before, x)
        return x

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        before, out = ctx.saved_tensors
        return gradient * out * 2 + before * 0


@torch.library.custom_op("autoac_tests::scale", mutates_args=())
def scale(x: Tensor, w: Tensor) -> Tensor:
    return x * w.sin()


scale.register_autograd(
    lambda ctx, g: (g * ctx.saved_tensors[1].sin(), g * ctx.saved_tensors[0] * ctx.saved_tensors[1].cos()),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("autoac_tests::count_and_add", mutates_args=("counts",))
def count_and_add(x: Tensor, counts: Tensor) -> Tensor:
    counts.add_(1)
    return x + counts


@torch.library.custom_op("autoac_tests::triple_", mutates_args=("x",))
def triple_(x: Tensor) -> None:
    x.mul_(3)


@torch.library.custom_op("autoac_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


noise.register_autograd(lambda ctx, g: g)


def functions(m: Body, x: Tensor) -> Any:
    y = OldStyle.apply(x.sin(), m.weight.cos())
    z, _ = NewStyle.apply(y.tanh(), (m.weight * 2).sin())
    u = InPlace.apply((z * 0.1).sin())
    return (u.cos() * u).sin()


def custom_ops(m: Body, x: Tensor) -> Any:
    y = scale(x.sin(), m.weight.cos())
    z = y.exp() * count_and_add(y.exp().detach(), m.counts)
    t = (z.detach() + 1).sin()
    triple_(t)
    triple_(m.counts)
    return noise(scale(z, (t * z).sin())).exp().sin()


def checkpoints(m: Body, x: Tensor) -> Any:
    for reentrant in (False, True):
        x = torch.utils.checkpoint.checkpoint(
            lambda t: F.dropout(m.inner(t).sin().exp(), 0.5), x.sin(), use_reentrant=reentrant
        ).cos()
    return x.exp()


def called_with_other_weights(m: Body, x: Tensor) -> Any:
    weights = {name: parameter * 2 for name, parameter in m.inner.named_parameters()}
    return torch.func.functional_call(m.inner, weights, x.sin()).exp()


def shares_weights(m: Body, x: Tensor) -> Any:
    return F.linear(m.inner(F.gelu(m.inner(x)).sin()), m.inner.weight.t()).exp()


def vectorized(m: Body, x: Tensor) -> Any:
    def body(row: Tensor) -> Tensor:
        return F.dropout((row.sin().exp() @ m.weight).sin(), 0.5)

    return torch.vmap(body, randomness="different")(x).exp()


def forward_derivatives(m: Body, x: Tensor) -> Any:
    def body(t: Tensor) -> Tensor:
        return (t.sin().exp() * t).cos()

    return torch.func.jvp(body, (x.sin(),), (m.weight,)), torch.func.jacfwd(body)(x[0].sin()).exp().sin()


def region_under_vmap(m: Body, x: Tensor) -> Any:
    def body(row: Tensor) -> Tensor:
        with save_recompute_policy("recompute_all"):
            return (row.sin().exp() @ m.weight).sin()

    return torch.vmap(body)(x)


def nested_jagged(m: Body, x: Tensor) -> Any:
    rows = torch.nested.nested_tensor_from_jagged(m.inner(x).sin(), torch.tensor([0, 1, 4]))
    return (F.gelu(rows).sin() * rows).values().exp().sin()


def nested_strided(m: Body, x: Tensor) -> Any:
    rows = torch.nested.as_nested_tensor([x[:1].sin(), x[1:].cos()])
    return torch.nested.to_padded_tensor(m.inner(rows), 0.0).sin().exp()


def sparse(m: Body, x: Tensor) -> Any:
    s = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [1, 0, 3]]), x.sin()[0, :3], (4, 4))
    dense = torch.sparse.mm(s, x.exp().sin())
    embedded = F.embedding(torch.tensor([1, 2, 1]), m.weight)
    return dense.sin().exp(), (s.coalesce() * 2).to_dense().sin(), embedded.sin().exp()


def data_parallel(m: Body, x: Tensor) -> Any:
    return nn.DataParallel(m.inner)(x.sin()).exp().sin()


def hooks_inside(m: Body, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        y = m.inner(x.sin()).exp()
    return m.inner(y.sin()).exp().sin()


BODIES = functions_of(globals(), "m")
pytestmark = [
    # Warnings of torch itself, for decompositions of forward mode and for nested tensors of strided layout.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    # A warning of Dynamo about an input that is not a leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.utils.checkpoint.*:UserWarning"),
]


@pytest.mark.parametrize("policy", ["recompute_all", "must_save_all"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.replace("_", " "))
def test_region_changes_no_bit(body: Callable[..., Any], policy: str) -> None:
    x = torch.linspace(-1, 2, 16).view(4, 4).requires_grad_()
    plain = step(lambda: Body(body), x)
    planned = step(lambda: Body(body), x, policy=policy)
    assert_same(plain, planned)
    assert bool(planned.recomputed()) == (policy == "recompute_all")


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.replace("_", " "))
def test_region_frees_everything(body: Callable[..., Any]) -> None:
    once = region_on(Body(body))
    with nothing_left():
        once()


def everything_recomputed(model: nn.Module, x: Tensor | None = None) -> Any:
    """Return a policy that recomputes every op that may be recomputed."""
    made = profile(model, torch.linspace(-1, 2, 16).view(4, 4).requires_grad_() if x is None else x)
    policy = plan(made, budget_bytes=1 << 30).policy()
    must = {op.name for op in build(made).ops if "storage of its own" in op.must_save}
    must |= {key for key in policy.decisions if key.split("/")[1].startswith(("autoac", "higher_order"))}
    decisions = {key: "save" if key in must else "recompute" for key in policy.decisions}
    return policy.model_copy(update={"decisions": decisions})


P = nn.utils.parametrizations


@pytest.mark.parametrize(
    "parametrize",
    [
        P.weight_norm,
        P.spectral_norm,
        P.orthogonal,
        lambda layer: P.orthogonal(layer, orthogonal_map="cayley"),
        lambda layer: P.orthogonal(layer, orthogonal_map="householder", use_trivialization=False),
    ],
    ids=["weight norm", "spectral norm", "orthogonal", "cayley", "householder"],
)
@pytest.mark.parametrize("cached", [False, True])
def test_parametrized_layers(parametrize: Callable[[nn.Module], nn.Module], cached: bool) -> None:
    def make() -> nn.Module:
        return nn.Sequential(parametrize(nn.Linear(4, 4)), nn.GELU(), parametrize(nn.Linear(4, 4)))

    around = nn.utils.parametrize.cached if cached else nullcontext
    x = torch.randn(2, 4, requires_grad=True)
    plain = step(make, x, around=around)
    planned = step(make, x, policy="recompute_all", around=around)
    assert_same(plain, planned)
    assert "aten.gelu.default" in planned.recomputed() or "aten.addmm.default" in planned.recomputed()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.vjp])
def test_region_inside_a_reverse_transform_is_an_error(transform: Any) -> None:
    ran = []

    def body(t: Tensor) -> Tensor:
        with save_recompute_policy("recompute_all"):
            ran.append(1)
            return t.sin().exp().sum()

    x = torch.randn(4)
    with pytest.raises(RuntimeError, match=r"torch.autograd.grad.*remove\(\)"):
        transform(body, x) if transform is torch.func.vjp else transform(body)(x)
    assert not ran
    assert active.region is None
    assert torch._C._len_torch_dispatch_stack() == 0


def test_reverse_transform_over_a_planned_model_is_an_error_before_anything_runs() -> None:
    ran = []
    model = nn.Linear(4, 4)
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    ac_client.apply(model, 1.0)
    weights = dict(model.named_parameters())

    def loss(w: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, w, torch.ones(2, 4)).sum()

    with pytest.raises(RuntimeError, match=r"torch\.func\.grad"):
        torch.func.grad(loss)(weights)
    assert not ran
    ac_client.applied(model).remove()
    torch.func.grad(loss)(weights)


@pytest.fixture
def mesh() -> Iterator[Any]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def wrapping(kind: str, request: pytest.FixtureRequest) -> Callable[[Tensor], Tensor]:
    """Return what wraps a tensor."""
    if kind == "two tensors":
        return lambda t: TwoTensor(t.clone(), t * 2)
    mesh = request.getfixturevalue("mesh")
    return lambda t: distribute_tensor(t, mesh, [Replicate()])


def forward_saves(w: Tensor) -> Tensor:
    return w * w


def forward_reads(w: Tensor) -> Tensor:
    return (w * 2).exp().sin()


def forward_views(w: Tensor) -> Tensor:
    return w.view(2, 2).exp().sin()


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda w: w.mul_(2),
    "detached": lambda w: w.detach().mul_(2),
    "view": lambda w: w.view(2, 2).mul_(2),
    "optimizer": lambda w: torch.optim.SGD([w], 0.1).step(),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    ("policy", "forward"),
    [
        ("must_save_all", forward_saves),
        ("recompute_all", forward_saves),
        ("recompute_all", forward_reads),
        ("recompute_all", forward_views),
    ],
)
@pytest.mark.parametrize("kind", ["two tensors", "distributed tensors"])
def test_wrapped_tensor_written_after_forward_is_an_error_in_every_step(
    kind: str, policy: str, forward: Callable[[Tensor], Tensor], write: str, request: pytest.FixtureRequest
) -> None:
    """Only the counter of the wrapper shows the write, and later steps compare no contents."""
    w = nn.Parameter(wrapping(kind, request)(torch.ones(4)))
    for _ in range(3):
        for writes in (False, True):
            with save_recompute_policy(policy):
                out = forward(w)
            if not writes:
                out.sum().backward()
                continue
            with torch.no_grad():
                WRITES[write](w)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()


@pytest.mark.parametrize("write", WRITES)
def test_distributed_tensor_read_by_to_local_and_then_written_is_an_error(
    write: str, request: pytest.FixtureRequest
) -> None:
    """It runs no op on the tensor, and autograd saves nothing of it."""
    w: Any = nn.Parameter(wrapping("distributed tensors", request)(torch.ones(4)))
    for _ in range(3):
        (w.to_local() * 2).exp().sin().sum().backward()
        with save_recompute_policy("recompute_all"):
            out = (w.to_local() * 2).exp().sin()
        with torch.no_grad():
            WRITES[write](w)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


class WritesWrapped(nn.Module):
    """Ops that are recomputed around a saved module, which may write to their tensor through a wrapper."""

    def __init__(self, wrap: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.inside, self.after = nn.Linear(8, 8), WrapsInside(wrap), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x).sin()
        self.inside(y)
        return self.after((y * 2).exp().sin()).sum()


class WrapsInside(nn.Module):
    writes = False

    def __init__(self, wrap: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> None:
        wrapped = self.wrap(x.detach())
        wrapped.mul(2).exp().sin()
        if self.writes:
            wrapped.mul_(2)


@pytest.mark.parametrize("kind", ["two tensors", "distributed tensors"])
def test_module_that_only_later_writes_to_wrapped_tensors_has_the_plain_gradients(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """No pause may hide the write."""
    mesh = request.getfixturevalue("mesh")

    def wrap(t: Tensor) -> Tensor:
        if kind == "two tensors":
            return TwoTensor(t, t.clone())
        return DTensor.from_local(t, mesh, [Replicate()])

    torch.manual_seed(0)
    plain, x = WritesWrapped(wrap), torch.randn(4, 8)
    planned, decide = copy.deepcopy(plain), lambda key: "save" if key.startswith("inside") else "recompute"
    ac_client.apply(planned, policy=policy_for(copy.deepcopy(plain), x, decide=decide))
    for number in range(4):
        for model in (plain, planned):
            model.zero_grad()
            model.inside.writes = number == 3
            model(x).backward()
        assert same_gradients(planned, plain)
    assert ac_client.applied(planned).report().recomputed > 0


class PartlyWrapped(nn.Module):
    """Plain layers, and one layer whose weights `wrap` has replaced by wrapped tensors."""

    def __init__(self, wrap: Callable[[Tensor], Tensor], enter: Any, leave: Any) -> None:
        super().__init__()
        self.before, self.wrapped, self.after = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        for name, parameter in list(self.wrapped.named_parameters()):
            setattr(self.wrapped, name, nn.Parameter(wrap(parameter.detach())))
        self.enter, self.leave = enter, leave

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(self.before(x).sin().exp().tanh())
        y = F.gelu(self.wrapped(y)).sin().exp()
        return self.after(self.leave(y).sin().tanh()).exp().sum()


def two_tensors() -> Callable[[], nn.Module]:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return TwoTensor(x.clone(), x * 2)

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return gradient.a + gradient.b * 2

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.a + x.b

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return TwoTensor(gradient.clone(), gradient.clone())

    return lambda: PartlyWrapped(lambda t: TwoTensor(t.clone(), t * 2), Twice.apply, Sum.apply)


def distributed_tensors(mesh: Any) -> Callable[[], nn.Module]:
    return lambda: PartlyWrapped(
        lambda t: distribute_tensor(t, mesh, [Shard(0)]),
        lambda t: DTensor.from_local(t, mesh, [Replicate()]),
        lambda t: t.full_tensor(),
    )


def insides(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a wrapper holds."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [t for held in inner if isinstance(held, Tensor) for t in insides(held)]


@pytest.mark.parametrize("kind", ["two tensors", "distributed tensors"])
def test_model_with_wrapped_weights(kind: str, request: pytest.FixtureRequest) -> None:
    make = two_tensors() if kind == "two tensors" else distributed_tensors(request.getfixturevalue("mesh"))
    x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()

    def gradients(policy: Any) -> tuple[list[Tensor], list[str]]:
        found = step(make, x, policy=policy)
        wrapped = [g for g in found.gradients.values() if g is not None]
        assert len(wrapped) == 6
        return [g for w in (*wrapped, *found.input_gradients) for g in insides(w)], found.recomputed()

    want, _ = gradients(None)
    assert len(want) == (9 if kind == "two tensors" else 7)
    for policy in ("recompute_all", everything_recomputed(make(), x.detach())):
        found, recomputed = gradients(policy)
        assert all(map(torch.equal, found, want))
        assert "aten.tanh.default" in recomputed
        assert "aten.gelu.default" in recomputed, "inside of the wrapped tensors"
    ac_client.apply(model := make(), budget_gb=1.0)
    for _ in range(2):
        model.zero_grad()
        model(x).backward()
    assert ac_client.applied(model).report().steps == 1
    assert ac_client.applied(model).report().off_path == ""


@pytest.mark.parametrize(("kind", "inside"), [("two tensors", 2), ("distributed tensors", 1)])
def test_plan_decides_ops_inside_of_wrapped_tensors(
    kind: str, inside: int, request: pytest.FixtureRequest
) -> None:
    make = two_tensors() if kind == "two tensors" else distributed_tensors(request.getfixturevalue("mesh"))
    ops = {op.name: op for op in build(profile(make(), torch.ones(3, 8))).ops}
    for i in range(inside):
        assert not ops[f"./aten.gelu.default#{i}"].must_save
    assert f"./aten.gelu.default#{inside}" not in ops
    assert not ops["./aten.tanh.default#0"].must_save


class Ragged(nn.Module):
    """Sequences of several lengths in one nested tensor, followed by plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)
        self.behind = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, sequences: Tensor) -> Tensor:
        attended = F.gelu(self.inside(sequences))
        if sequences.layout is torch.jagged:  # on a CPU this makes nested tensors of the other layout
            heads = attended.unflatten(-1, (2, 4)).transpose(1, 2)
            attended = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)
        return self.behind(torch.cat(list(attended.unbind())))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_planned_model_with_nested_tensors(layout: torch.layout) -> None:
    def gradients(recomputed: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Ragged()
        lengths = [torch.randn(n, 8) for n in (3, 1, 5)]
        batch = torch.nested.nested_tensor(lengths, layout=layout)
        if recomputed:
            ac_client.apply(model, policy=everything_recomputed(model, batch))
        model(batch).square().sum().backward()
        return [p.grad for p in model.parameters()]

    assert same(gradients(recomputed=True), gradients(recomputed=False))


def chain(x: Tensor) -> Tensor:
    return (x.sin().exp() * x).cos()


def gradient(out: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(out.sum(), x)[0]


def test_dispatch_modes_around_and_inside_see_every_op() -> None:
    x, log = torch.randn(4, requires_grad=True), EventLog()
    outer, inner, later = SeenOps(), SeenOps(), SeenOps()
    with outer, save_recompute_policy("recompute_all", log=log), inner:
        z = chain(x)
    with later:
        found = gradient(z, x)
    assert torch.equal(found, gradient(chain(x), x))
    assert len(outer.ops) == len(inner.ops) == 4
    assert later.ops.count("aten.exp.default") == 1, "a mode around backward sees the recompute"


def test_hooks_around_a_region_see_its_inputs_and_saved_tensors() -> None:
    x, log = torch.randn(4, requires_grad=True), EventLog()
    seen: list[Tensor] = []

    class Moved:
        def __init__(self, tensor: Tensor) -> None:
            seen.append(tensor)
            self.tensor = tensor.clone()

    with (
        torch.autograd.graph.saved_tensors_hooks(Moved, lambda moved: moved.tensor),
        save_recompute_policy([torch.ops.aten.exp], log=log),
    ):
        z = chain(x)
    kept = [t for t in seen if torch.equal(t, x.detach().sin().exp())]
    assert any(t is x for t in seen)
    assert kept
    assert len(seen) < 6, "what is recomputed is none of theirs"
    assert torch.equal(gradient(z, x), gradient(chain(x), x))
    assert ("recompute", "aten.mul.Tensor") in log.events
