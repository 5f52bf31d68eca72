"""Test that fully saved modules run without the mode, and that writes there are detected."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from stepping import nothing_left, policy_for, trained
from torch import Tensor, nn

import ac_client
from ac_client import StaleError, save_recompute_policy
from autoac.tape.runtime import policy_context
from autoac.tape.runtime.region import Region


@contextmanager
def paused(region: save_recompute_policy | None) -> Iterator[None]:
    assert region is None or region._entered[0].pause()
    yield
    if region is not None:
        region._entered[0].resume()


def in_a_pause(act: Callable[[Tensor, Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return gradients with a write by `act` that the region does not see, and without a region."""

    def run(region: save_recompute_policy | None) -> list[Tensor]:
        torch.manual_seed(0)
        leaf, constant = torch.randn(4, requires_grad=True), torch.randn(4)
        with region or nullcontext():
            made = leaf.sin()
            early = made.exp() * constant
            with paused(region):
                inside = act(made, constant)
            y = (made * made).cos() + early + inside
        y.sum().backward()
        assert leaf.grad is not None
        return [leaf.grad, y.detach()]

    return run(save_recompute_policy("recompute_all")), run(None)


@pytest.mark.parametrize("saves", [False, True], ids=["after the pause", "saved inside of it"])
def test_write_to_an_output_is_seen_by_its_counter(saves: bool, caplog: pytest.LogCaptureFixture) -> None:
    planned, plain = in_a_pause(lambda made, _: made.mul_(2).cos() if saves else made.mul_(2).detach())
    assert all(map(torch.equal, planned, plain))
    assert not caplog.messages  # no comparison of contents had to find it


def test_write_to_a_tensor_that_a_recorded_op_read_is_an_error_in_backward() -> None:
    with pytest.raises((StaleError, RuntimeError), match="modified by an inplace operation"):
        in_a_pause(lambda made, constant: constant.add_(1))


@pytest.mark.parametrize("again", [lambda view: view, lambda view: view[:], lambda view: view.detach()])
def test_write_is_detected_where_only_a_view_of_the_version_is_left(
    again: Callable[[Tensor], Tensor],
) -> None:
    def run(region: save_recompute_policy | None) -> list[Tensor]:
        leaf = torch.linspace(-1, 1, 6).requires_grad_()
        with region or nullcontext():
            view = leaf.sin().detach()
            with paused(region):
                view.mul_(2)
            y = leaf * again(view).cos()
        y.sum().backward()
        assert leaf.grad is not None
        return [leaf.grad, y.detach()]

    assert all(map(torch.equal, run(save_recompute_policy("recompute_all")), run(None)))


def test_version_with_only_a_view_left_is_recomputed_after_a_pause_without_writes() -> None:
    leaf = torch.linspace(-1, 1, 6).requires_grad_()
    context = save_recompute_policy("recompute_all")
    with context:
        view = leaf.sin().view(2, 3)
        with paused(context):
            (leaf + 1).sum()
        y = view.cos().sum()
    contents = weakref.ref(view.untyped_storage())
    del view
    assert contents() is None
    y.backward()
    grad, leaf.grad = leaf.grad, None
    leaf.sin().view(2, 3).cos().sum().backward()
    assert torch.equal(grad, leaf.grad)


class Alternating(nn.Module):
    """Saved linear layers between recomputed functions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh().exp()
        return x.sum()


def test_module_with_one_saved_op_runs_without_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(-1, 1, 8).view(2, 4)
    torch.manual_seed(0)
    policy = policy_for(Alternating(), x, decide=lambda key: "recompute" if "tanh" in key else "save")
    model = ac_client.apply(Alternating(), policy=policy)
    seen: list[str] = []
    dispatch = Region.__torch_dispatch__

    def watching(self: Region, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(Region, "__torch_dispatch__", watching)
    first = trained(model, lambda _: x, 1)
    assert seen.count("aten.addmm.default") == 3
    seen.clear()
    second = trained(model, lambda _: x, 1)
    assert seen.count("aten.addmm.default") == 0
    assert seen.count("aten.tanh.default") == 3
    torch.manual_seed(0)
    assert ac_client.applied(model).report().off_path == ""
    ac_client.applied(model).remove()
    assert all(map(torch.equal, first + second, 2 * trained(model, lambda _: x, 1)))


def test_region_that_ends_while_paused_frees_everything() -> None:
    with nothing_left():
        x = torch.randn(4, requires_grad=True)
        with save_recompute_policy("recompute_all") as _:
            y = x.sin().exp()
            assert policy_context.active.region.pause()
        assert torch._C._len_torch_dispatch_stack() == 0
        y.sum().backward()
        del x, y
