"""Compare random programs that move outputs to the host with plain ones, the planner and the allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fuzzers import moved_programs
from torch.utils.checkpoint import CheckpointPolicy

from autoac.planner.formats.policy import THE_END, MovePoints
from autoac.tape.runtime.cursor import Cursor, Route
from autoac.tape.runtime.moves.copies import HostCopy
from autoac.tape.runtime.policy_context import active, save_recompute_policy


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_run_as_predicted(seed: int) -> None:
    assert moved_programs.tried(seed).differs == ""


def test_write_under_a_policy_that_sees_outputs_waits_for_the_copy() -> None:
    """The moved version is read by what backward recomputes, and is written while it leaves."""
    sin, exp, add = "./aten.sin.default#0", "./aten.exp.default#0", "./aten.add_.Tensor#0"
    decisions = {sin: "offload", exp: "recompute", add: "save"}
    route = Route(decisions, moves={sin: MovePoints(free=THE_END, fetch=exp)})

    def gradient(planned: bool) -> torch.Tensor | None:
        x = torch.linspace(0, 1, 1024, requires_grad=True)
        if not planned:
            h = x.sin()
            k = h.exp()
            (k + h.add_(1)).sum().backward()
            return x.grad
        with save_recompute_policy(Cursor(route)):
            h = x.sin()
            k = h.exp()
            with save_recompute_policy(lambda ctx, *args, **kwargs: CheckpointPolicy.PREFER_SAVE):
                h.add_(1)
        (k + h).sum().backward()
        return x.grad

    expected, got = gradient(False), gradient(True)
    assert torch.equal(expected, got)


def test_moved_output_that_is_held_since_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched, fetch = [], HostCopy.fetch

    def spied(copy: HostCopy) -> Any:
        fetched.append(copy)
        return fetch(copy)

    monkeypatch.setattr(HostCopy, "fetch", spied)
    norm, sin = "./aten.native_layer_norm.default#0", "./aten.sin.default#0"
    route = Route({norm: "offload", sin: "recompute"}, moves={norm: MovePoints(free=THE_END, fetch=sin)})
    x = torch.linspace(0, 1, 1024).reshape(4, 256).requires_grad_()
    with save_recompute_policy(Cursor(route)):
        out, _, _ = torch.native_layer_norm(x, [256], None, None, 1e-5)
        y = out.sin()
        active.region.storages.pin(out)
    y.sum().backward(retain_graph=True)
    assert len(fetched) == 2  # the mean and the deviation
