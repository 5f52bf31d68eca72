"""Test that in-place writes, moved storages, aliases and randomness in a region change no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import Body
from stepping import EventLog, assert_same, functions_of, nothing_left, region_on, step
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from ac_client import StaleError, save_recompute_policy

F = nn.functional

# Forward mode loads decompositions, which torch scripts.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


def writes_a_parameter(m: Body, x: Tensor) -> Any:
    y = (x * m.weight.detach()).sin().exp()
    with torch.no_grad():
        m.weight.mul_(2)
    return (x @ m.weight).cos() * y.detach() * x


def writes_buffers(m: Body, x: Tensor) -> Any:
    y = x.sin()
    m.cache[:4].copy_(y.detach())
    z = (m.cache[:4].clone() * y).exp().sin()
    m.cache[2:6].add_(1)
    m.cache.mul_(2)
    m.steps += 1
    return z + (m.cache[:4].clone() * x).tanh().cos()


def writes_its_input(m: Body, x: Tensor) -> Any:
    given = x.detach().clone()
    a = (x + given).sin().exp()
    with torch.no_grad():
        given.view(16)[::2].neg_()
        x.detach()[0].zero_()  # the caller's own tensor
        x.detach()[0].add_(1)
    return a.sum() * (x + given).tanh().exp()


def writes_views(m: Body, x: Tensor) -> Any:
    y = x.sin()
    top, bottom = y.split(2)
    columns, diagonal = y.unbind(1), y.diagonal()
    z = y.clone()
    z[1].mul_(2)
    z.t()[2].add_(columns[0])
    z.diagonal().copy_(diagonal.exp())
    z.unfold(0, 2, 2)[0].sin_()
    torch.as_strided(z, (2, 2), (5, 1)).cos_()
    z[z > 0] = 3.0
    z.index_put_((torch.tensor([1]),), bottom[0], accumulate=True)
    z.scatter_add_(0, torch.zeros(1, 4, dtype=torch.long), top[:1])
    z.swapaxes_(0, 1).unsqueeze_(0).transpose_(1, 2)
    return (z * z).sin()


def writes_out(m: Body, x: Tensor) -> Any:
    with torch.no_grad():
        product, pair = torch.empty(0), torch.empty(2, 4, 4)
        torch.mul(x, x, out=product)
        torch.sin(x, out=pair[1])
        torch.cos(x, out=pair[0])
        torch.exp(pair[0], out=pair[1])
    return (x * product).sin() * pair[0] + (pair[1] * x).cos()


def foreach(m: Body, x: Tensor) -> Any:
    a = torch._foreach_mul([x * 2, x.sin()], 2.0)
    with torch.no_grad():
        b = torch._foreach_exp([t.detach() for t in a])
        torch._foreach_add_([b[0], m.cache[:4]], 1.0)
        rows = torch.zeros(2, 4, 4)
        torch._foreach_add_([rows[0], rows[1]], b)
    return (a[0] * b[0]).sin() + (a[1] * b[1] * m.cache[:4]).cos() * rows[0] + rows[1] * x


def moves_storages(m: Body, x: Tensor) -> Any:
    with torch.no_grad():
        resized = (x * 2).clone().resize_(2, 2).mul_(2)
        moved = torch.zeros(3).set_((x * 3).sin().exp())
        moved.mul_(2)
        old, new = x.exp(), x.sin()
        old.set_(new.untyped_storage(), 0, (4, 4), (4, 1)).add_(1)
        pointed = torch.zeros(4, 4)
        pointed.data = moved.exp()
    return (x * moved).sin() * new + resized.sum() * x * old * pointed


def shows_its_storage_otherwise(m: Body, x: Tensor) -> Any:
    # Assigning to .data runs no op and does not change the version counter.
    with torch.no_grad():
        made = x.sin()
        once = made * made.exp()
        made.data = made.data.t()
        given = m.weight.detach().clone()
        twice = (made * given).exp()
        given.data = given.data.t()
        both = torch.cat([x, x]).cos() * 2
        doubled = both * 2
        both.data = both.data[3:7]
        turned = torch.complex(x, made).exp()
        angle = (turned * 2).angle()
        turned.data = turned.data.conj()
    z = (made * m.weight).exp() * (x * given).sin() * (both * x).cos() * (x * turned).imag.exp()
    return z * once * twice * angle * doubled[3:7] * (both * 2).cos()


def complex_numbers(m: Body, x: Tensor) -> Any:
    y = torch.view_as_complex(x.sin().view(4, 2, 2))
    z = torch.view_as_real(y.sin() * y.conj())
    q = torch.fft.fft(y.conj().imag.exp()).exp()
    return (z[..., 0] * y.conj().imag).sin() * q.real + (q.conj() * y).abs()


def depends_on_data(m: Body, x: Tensor) -> Any:
    y = x.sin()
    z = y[(y > 0).nonzero(as_tuple=True)].exp().sin()
    if z.sum().item() > 0:
        z = z * y.max().item()
    return z.cos(), torch.masked_select(y.cos(), y > 0).exp(), torch.unique(y.detach())


def draws(m: Body, x: Tensor) -> Any:
    g = m.generator
    y = x * torch.rand(4, 4, generator=g) * torch.empty(4, 4).normal_(generator=g)
    z = y.sin() * torch.bernoulli(torch.full((4, 4), 0.5), generator=g) + torch.randperm(4, generator=g)
    noise = torch.empty(4).exponential_() * torch.empty(4).geometric_(0.5) * torch.randint(1, 5, (4,))
    return (F.rrelu(z.sin(), training=True) * noise).sin(), F.gumbel_softmax(z).exp(), F.dropout(z).sin()


def suspends_gradients(m: Body, x: Tensor) -> Any:
    y = x.sin()
    with torch.no_grad():
        t = (y * 2).exp()
        t.add_(y)
    with torch.inference_mode():
        u = (t * 2).sin()
    return (y * t).sin() + u.clone()


def aliases_its_input(m: Body, x: Tensor) -> Any:
    y = x.view(16).sin().exp().view(4, 4)
    return x.t(), y[1:] * x.t()[:3], x.expand(2, 4, 4).sin().exp()


def forward_mode(m: Body, x: Tensor) -> Any:
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.sin(), torch.ones(4, 4))
        out = forward_ad.unpack_dual((dual.exp() * dual).sin())
        return out.primal.cos(), out.tangent.sin()


BODIES = functions_of(globals(), "m")
POLICIES = {
    "recompute all": "recompute_all",
    "must recompute": CheckpointPolicy.MUST_RECOMPUTE,
    "save some": [torch.ops.aten.sin, torch.ops.aten.mul],
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.replace("_", " "))
def test_region_changes_no_bit(body: Callable[..., Any], policy: str) -> None:
    x = torch.linspace(-1, 2, 16).view(4, 4).requires_grad_()
    want = x.detach().clone()
    plain = step(lambda: Body(body), x)
    written = x.detach().clone()
    with torch.no_grad():
        x.copy_(want)
    planned = step(lambda: Body(body), x, policy=POLICIES[policy])
    assert_same(plain, planned)
    assert torch.equal(x, written)
    if policy == "recompute all":
        assert planned.recomputed(), "nothing was recomputed, so nothing was tested"


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.replace("_", " "))
def test_region_frees_everything(body: Callable[..., Any]) -> None:
    once = region_on(Body(body))
    with nothing_left():
        once()
    with nothing_left():
        once(backward=False)


@pytest.mark.parametrize("norm", ["instance norm", "cumulative batch norm"])
def test_running_statistics_are_updated_once_in_every_norm(norm: str) -> None:
    def make() -> nn.Module:
        if norm == "instance norm":
            layer: nn.Module = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        else:
            layer = nn.BatchNorm1d(4, momentum=None)
        return nn.Sequential(layer, nn.GELU(), nn.BatchNorm1d(4))

    x = torch.randn(5, 4, 3, requires_grad=True)
    plain, planned = step(make, x), step(make, x, policy="recompute_all")
    assert_same(plain, planned)
    assert "aten.batch_norm.default" in planned.recomputed()


def test_op_that_moves_a_storage_is_saved_although_the_policy_insists() -> None:
    log = EventLog()
    x = torch.randn(4, requires_grad=True)
    with save_recompute_policy(CheckpointPolicy.MUST_RECOMPUTE, log=log):
        with torch.no_grad():
            moved = torch.zeros(1).set_((x * 3).exp())
        z = (x * moved).sin()
    z.sum().backward()
    m = (x.detach() * 3).exp()
    assert torch.equal(x.grad, (x.detach() * m).cos() * m)
    assert ("recompute", "aten.mul.Tensor") in log.events
    assert not any(kind == "recompute" and "set_" in name for kind, name in log.events)


def sparse(t: Tensor) -> Tensor:
    return t.to_sparse()


@pytest.mark.parametrize("wrapped", [sparse, torch.Tensor.clone])
def test_argument_may_be_written_after_it_was_read(wrapped: Callable[[Tensor], Tensor]) -> None:
    def run(policy: str | None) -> Tensor:
        x = torch.linspace(0, 1, 16).view(4, 4).requires_grad_()
        s = wrapped(torch.eye(4))
        values = s._values() if s.is_sparse else s
        region = save_recompute_policy(policy) if policy else torch.enable_grad()
        with region:
            y = (torch.mm(s, x.detach()) * x).exp().sin()
            with torch.no_grad():
                values.mul_(2)
            z = torch.mm(s, x.detach()) * x
        (gradient,) = torch.autograd.grad((y + z).sum(), x)
        return gradient

    assert torch.equal(run("recompute_all"), run(None))


SPARSE_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": lambda s: s.mul_(2),
    "its values": lambda s: (s._values() if s.layout is torch.sparse_coo else s.values()).mul_(2),
    "its coordinates": lambda s: (s._indices() if s.layout is torch.sparse_coo else s.col_indices()).mul_(0),
}


@pytest.mark.parametrize("written", SPARSE_WRITES)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_sparse_tensor_written_after_a_read_raises_the_error_of_autograd(
    layout: torch.layout, written: str, inside: bool
) -> None:
    def run(policy: str | None) -> Tensor:
        s, x = torch.eye(4).to_sparse(layout=layout), torch.ones(4, 4, requires_grad=True)
        with save_recompute_policy(policy) if policy else torch.enable_grad():
            z = torch.sparse.mm(s, x.exp()).sin().exp()
            if inside:
                SPARSE_WRITES[written](s)
        if not inside:
            SPARSE_WRITES[written](s)
        return torch.autograd.grad(z.sum(), x)[0]

    try:
        want = run(None)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run("recompute_all")
    else:  # autograd does not detect the write, and uses the new contents
        assert torch.equal(run("recompute_all"), want)


def test_values_of_a_sparse_tensor_written_after_a_recomputed_read_are_an_error() -> None:
    s, x = torch.eye(4).to_sparse(), torch.ones(4, requires_grad=True)
    with save_recompute_policy("recompute_all"):
        z = (x + s._values()).sin()
    s._values().mul_(2)
    with pytest.raises(StaleError):
        z.sum().backward()


@pytest.mark.parametrize("read_by", ["a recomputed op", "autograd"])
def test_write_through_an_alias_of_a_freed_tensor_is_an_error(read_by: str) -> None:
    x = torch.randn(4, requires_grad=True)
    with save_recompute_policy([torch.ops.aten.cos]):
        h = x.cos()
        z = (h * 1).exp().sin() if read_by == "a recomputed op" else h.sin()
    alias = h.detach()
    del h
    alias.mul_(3)
    with pytest.raises(StaleError):
        z.sum().backward()


def test_inference_tensor_may_be_written_after_forward() -> None:
    x, log = torch.randn(4, requires_grad=True), EventLog()
    with torch.inference_mode():
        mask = torch.ones(4)
    with save_recompute_policy("recompute_all", log=log):
        z = (x + mask).sin()
    with torch.inference_mode():
        mask.add_(1)
    z.sum().backward()
    assert torch.equal(x.grad, (x.detach() + 1).cos())
    assert ("recompute", "aten.add.Tensor") in log.events


def test_training_continues_after_inference_mode() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.inference_mode(), save_recompute_policy("recompute_all"):
        layer(x).sin()
    log = EventLog()
    with save_recompute_policy("recompute_all", log=log):
        loss = layer(x).sin().exp().sum()
    loss.backward()
    want, layer.weight.grad = layer.weight.grad, None
    layer(x).sin().exp().sum().backward()
    assert torch.equal(layer.weight.grad, want)
    assert ("recompute", "aten.addmm.default") in log.events


def test_freed_storage_of_an_input_is_an_error() -> None:
    x, given = torch.randn(4, requires_grad=True), torch.ones(4)
    with save_recompute_policy("recompute_all"):
        z = (x * 1 + given).sin()
    given.untyped_storage().resize_(0)
    with pytest.raises(StaleError, match=r"aten.add.Tensor reads, must have 16 bytes, got 0"):
        z.sum().backward()


def test_storage_that_is_freed_and_filled_again_is_allowed() -> None:
    x, given = torch.randn(4, requires_grad=True), torch.ones(4)
    with save_recompute_policy("recompute_all"):
        z = (x * 1 + given).sin()
    given.untyped_storage().resize_(0)  # like FSDP between forward and backward
    given.untyped_storage().resize_(16)
    given.data.copy_(torch.ones(4))
    z.sum().backward()
    assert torch.equal(x.grad, (x.detach() + 1).cos())


@pytest.mark.parametrize("kept", [False, True])
def test_output_written_after_the_region_is_correct_or_raises(kept: bool) -> None:
    x = torch.randn(4, requires_grad=True)
    with save_recompute_policy([torch.ops.aten.exp] if kept else "recompute_all"):
        y = x.exp()
        z = y.sin()
    with torch.no_grad():
        y.mul_(2)
    if kept:
        with pytest.raises(StaleError):
            z.sum().backward()
    else:
        z.sum().backward()
        want = x.detach().exp()
        assert torch.equal(x.grad, want.cos() * want)


class WritesOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (y,) = ctx.saved_tensors
        y.mul_(0)
        return gradient * 2


@pytest.mark.parametrize("through", ["autograd", "a recomputed op"])
def test_backward_that_overwrites_a_tensor_of_others_is_an_error(through: str) -> None:
    x = torch.ones(4, requires_grad=True)
    with save_recompute_policy("recompute_all"):
        y = x.cos().exp()
        a = y.sin() if through == "autograd" else (y + 1).exp()
        b = WritesOver.apply(y)
    with pytest.raises(StaleError, match="clone"):
        (a + b).sum().backward()


def test_backward_may_overwrite_its_own_tensor() -> None:
    x = torch.ones(4, requires_grad=True)
    with save_recompute_policy("recompute_all"):
        z = WritesOver.apply((x * 3).sin())
    z.sum().backward()
    assert torch.equal(x.grad, (x.detach() * 3).cos() * 2 * 3)


def test_reading_a_saved_tensor_outside_of_backward_consumes_no_use() -> None:
    x = torch.randn(5, requires_grad=True)
    log = EventLog()
    with save_recompute_policy("recompute_all", log=log):
        y = x.exp().sin()
    want = x.detach().exp()
    for _ in range(3):
        assert torch.equal(y.grad_fn._saved_self, want)
    y.sum().backward()
    assert torch.equal(x.grad, want.cos() * want)


@pytest.mark.parametrize("written", ["parameter", "input", "view of input", "saved value"])
def test_write_after_forward_is_an_error_as_in_autograd(written: str) -> None:
    parameter = torch.nn.Parameter(torch.randn(5, 5))
    given = torch.randn(5, 5, requires_grad=True)
    with save_recompute_policy([torch.ops.aten.mm]):
        kept = given.t() @ parameter
        z = kept.exp().sin()
    with torch.no_grad():
        {"parameter": parameter, "input": given, "view of input": given[0], "saved value": kept}[
            written
        ].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        z.sum().backward()
    assert isinstance(raised.value, StaleError)
