"""Run a checkpoint where torch's takes over, and compiled, traced, autocast, with hooks, on meta tensors."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import MM, THEIRS, chain, leaf, replayed, same, selective
from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn

from ac_client import checkpoint, checkpoint_sequential
from ac_client.measure.memory_timeline import AllocatorTimeline


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
    # The checkpoint of torch calls again. Arguments of a partial are not inspected.
    assert len(calls) == (1 if way == "partial" else 2)
