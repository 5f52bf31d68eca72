"""Test higher-order ops in regions and planned models: control flow, shared subgraphs, flex attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from blocks import Body
from stepping import assert_same, policy_for, step
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention import flex_attention as flex

from ac_client import StaleError, save_recompute_policy
from autoac.planner import build, plan
from autoac.profiler import profile
from autoac.tape.torch_facts import minor_version

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # Warnings of torch itself when Dynamo is loaded, and about an input that is not a leaf.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]


def thrice(t: Tensor) -> Tensor:
    body = lambda i, t: (i + 1, t.sin() * 1.5)  # noqa: E731
    return while_loop(lambda i, t: i < 3, body, (torch.tensor(0), t))[1]


def conditional(m: Body, x: Tensor) -> Any:
    def yes(t: Tensor) -> Tensor:
        return t.sin() @ m.weight

    return torch.cond(x.sum() > 0, yes, lambda t: t.cos(), (x.exp(),)).sin().exp()


def loop(m: Body, x: Tensor) -> Any:
    return (thrice(x.detach().exp()) * x.sin() @ m.weight).exp().sin()


def loop_with_gradients(m: Body, x: Tensor) -> Any:
    return (thrice(x.exp()) @ m.weight).sin().exp()


def mapped(m: Body, x: Tensor) -> Any:
    return map_rows(lambda row, w: (row @ w).sin(), x.exp(), m.weight).sin().exp()


def scanned(m: Body, x: Tensor) -> Any:
    carry, rows = scan(lambda c, t: ((c + t).tanh(), (c * t).sin()), x[0].exp(), (x @ m.weight).sin())
    return carry.sin() + rows.exp().sin()


def scanned_in_a_tree(m: Body, x: Tensor) -> Any:
    return associative_scan(lambda a, b: a * b, (x @ m.weight).exp(), 0, combine_mode="generic").sin().exp()


@torch.compiler.nested_compile_region
def block(t: Tensor, w: Tensor) -> Tensor:
    return (t.sin() @ w).tanh()


def subgraph(m: Body, x: Tensor) -> Any:
    return block(block(x.exp(), m.weight), m.weight).sin().exp()


def subgraph_compiled(m: Body, x: Tensor) -> Any:
    compiled = torch.compile(lambda t, w: block(block(t, w), w).cos(), backend="aot_eager")
    return compiled(x.exp(), m.weight).sin().exp()


def loop_compiled(m: Body, x: Tensor) -> Any:
    return (torch.compile(thrice, backend="aot_eager", fullgraph=True)(x.exp()) @ m.weight).sin().exp()


def attention(attend: Callable[..., Any]) -> Callable[..., Any]:
    def body(m: Body, x: Tensor) -> Any:
        heads = (x @ m.weight).sin().view(1, 2, 4, 2)
        mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 4, 4, device="cpu")
        out = attend(heads, heads.exp(), heads.cos(), lambda s, b, h, q, k: s + m.weight[q, k], mask)
        return out.sin().exp()

    return body


flex_eager = attention(flex.flex_attention)
flex_compiled = attention(
    lambda *args: torch.compile(flex.flex_attention, backend="aot_eager", fullgraph=True)(*args)
)


BODIES = {
    "cond": conditional,
    "while_loop": loop,
    "while_loop with gradients": loop_with_gradients,
    "while_loop compiled": loop_compiled,
    "map": mapped,
    "scan": scanned,
    "associative_scan": scanned_in_a_tree,
    "invoke_subgraph": subgraph,
    "invoke_subgraph compiled": subgraph_compiled,
    "flex_attention": flex_eager,
    "flex_attention compiled": flex_compiled,
}
RUN_THROUGH = {"invoke_subgraph", "associative_scan"}  # outside of torch.compile they are plain calls


def made(body: str) -> Body:
    return Body(lambda m, x: BODIES[body](m, x.sin().exp().sin()))


@pytest.fixture
def flex_attention_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow flex attention's backward on the CPU, which torch rejects; its eager ops are those of a GPU."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)


@pytest.mark.usefixtures("flex_attention_on_the_cpu")
@pytest.mark.parametrize("body", BODIES)
def test_region_changes_no_bit(body: str) -> None:
    x = torch.linspace(-1, 2, 16).view(4, 4).requires_grad_()
    plain = step(lambda: made(body), x)
    for policy in ("recompute_all", "must_save_all"):
        planned = step(lambda: made(body), x, policy=policy)
        assert_same(plain, planned)
        recomputed = planned.recomputed()
        assert bool(recomputed) == (policy == "recompute_all")
        assert not any("higher_order" in name for name in recomputed), "what runs inside is not seen"
        compiled = body.endswith(" compiled")  # one op, with what runs inside
        seen = any("higher_order" in name for _, name in planned.log.events)
        assert seen == (body not in RUN_THROUGH and not compiled)
        assert ("CompiledFunction" in recomputed) == (compiled and policy == "recompute_all")


@pytest.mark.usefixtures("flex_attention_on_the_cpu")
@pytest.mark.parametrize("body", BODIES)
def test_planned_model_changes_no_bit(body: str) -> None:
    x = torch.linspace(-1, 2, 16).view(4, 4).requires_grad_()
    policy = policy_for(made(body), x, decide=lambda key: "save" if "higher_order" in key else "recompute")
    planned = step(lambda: made(body), x, policy=policy)
    assert_same(step(lambda: made(body), x), planned)
    assert planned.recomputed()


def test_flex_attention_without_gradients_on_a_cpu_works_in_a_region() -> None:
    q = torch.randn(1, 2, 4, 2)
    x = torch.randn(4, 2, requires_grad=True)

    def run(policy: str | None) -> list[Tensor]:
        with save_recompute_policy(policy) if policy else nullcontext():
            out = (flex.flex_attention(q.sin(), q, q.exp()) * x.exp()).sin()
        return [out.detach(), *torch.autograd.grad(out.sum(), x)]

    assert all(map(torch.equal, run("recompute_all"), run(None)))


def test_flex_attention_with_gradients_on_a_cpu_raises_the_error_of_torch() -> None:
    q = torch.randn(1, 2, 4, 2, requires_grad=True)
    with pytest.raises(NotImplementedError, match="CPU"), save_recompute_policy("recompute_all"):
        flex.flex_attention(q, q, q)
    assert torch._C._len_torch_dispatch_stack() == 0


def writes(t: Tensor) -> Tensor:
    t.mul_(2)
    return t + 0


def cond_that_writes(t: Tensor) -> None:
    with torch.no_grad():
        torch.cond(t.sum() > 0, writes, lambda t: t + 0, (t,))


def loop_that_writes(t: Tensor) -> None:
    def body(i: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        t.mul_(2)
        return i + 1, u.sin()

    with torch.no_grad():
        while_loop(lambda i, u: i < 2, body, (torch.tensor(0), t.clone()))


WRITING = {"cond": cond_that_writes, "while_loop": loop_that_writes}


def may_write(op: str, since: tuple[int, int]) -> Any:
    return pytest.param(
        op, marks=pytest.mark.skipif(minor_version() < since, reason=f"{op} may not write yet")
    )


OPS = [may_write("cond", (2, 12)), may_write("while_loop", (2, 13))]


@pytest.mark.parametrize("op", OPS)
def test_tensor_written_by_a_higher_order_op_may_be_read_before_and_after(op: str) -> None:
    def run(policy: str | None) -> list[Tensor]:
        x = torch.linspace(0.1, 1, 4).requires_grad_()
        with save_recompute_policy(policy) if policy else nullcontext():
            made = x.detach() * 2 + 1
            before = (x.exp() * (made if policy else made.clone())).sin()
            WRITING[op](made)
            out = before + (x * made).exp()
        return [out.detach(), *torch.autograd.grad(out.sum(), x)]

    assert all(map(torch.equal, run("recompute_all"), run(None)))


@pytest.mark.parametrize("op", OPS)
def test_input_written_by_a_higher_order_op_after_a_read_is_an_error(op: str) -> None:
    x, given = torch.ones(4, requires_grad=True), torch.ones(4)
    with save_recompute_policy("recompute_all"):
        early = (x + given).sin()
        WRITING[op](given)
        late = (x + given).sin()
    assert torch.equal(torch.autograd.grad(late.sum(), x)[0], (x + given).cos().detach())
    with pytest.raises(StaleError):
        early.sum().backward()


@pytest.mark.skipif(minor_version() < (2, 12), reason="cond may not write yet")
def test_plan_saves_readers_of_an_input_that_a_higher_order_op_writes() -> None:
    class Writes(Body):
        def __init__(self) -> None:
            super().__init__(loop)
            self.register_buffer("given", torch.ones(4, 4))

        def forward(self, x: Tensor) -> Any:
            y = (x.exp() + self.given).sin()
            cond_that_writes(self.given)
            return (y @ self.weight + self.given).exp().sin()

    x = torch.linspace(-1, 2, 16).view(4, 4).requires_grad_()
    found = profile(Writes(), x)
    musts = {op.name: op.must_save for op in build(found).ops}
    assert musts["./aten.add.Tensor#0"] == "reads what is overwritten later"
    policy = plan(found, budget_bytes=1 << 30).policy()
    decisions = {name: "save" if musts.get(name) else "recompute" for name in policy.decisions}
    planned = step(Writes, x, policy=policy.model_copy(update={"decisions": decisions}))
    assert_same(step(Writes, x), planned)
    assert "aten.exp.default" in planned.recomputed()
