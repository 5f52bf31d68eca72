"""With the loss outside of the model: the peak is the allocator's, the events are the runtime's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import ConvNet, Gates, InPlace, Transformer, Views
from stepping import expected_log, scalar
from torch import nn

from ac_client.cursor import Cursor, Route
from ac_client.measure import AllocatorTimeline
from ac_client.replay import Log
from ac_client.runtime import save_recompute_policy
from autoac.planner.graph import OpId, SaveSet, build, closed
from autoac.planner.policy import decisions
from autoac.planner.profile import Profile
from autoac.planner.simulate import simulate
from autoac.profiler import profile
from autoac.profiler.modules import watch_modules

Make = Callable[[], nn.Module]


class Penalised(nn.Module):
    """Differentiates inside its forward what it differentiates again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        y = self.inner(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.sin().square().sum(1, keepdim=True)


CASES: dict[str, tuple[Make, tuple[int, ...]]] = {
    "transformer": (lambda: Transformer(layers=3, width=64), (4, 64, 64)),
    "convolutions": (ConvNet, (16, 3, 8, 8)),
    "in place": (lambda: InPlace(rows=512), (512, 16)),
    "views": (Views, (64, 8)),
    "chunks in place": (Gates, (64, 16)),
    "backward in forward": (Penalised, (64, 16)),
}


def made(make: Make) -> nn.Module:
    torch.manual_seed(0)
    return make()


def casting(on: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if on else contextlib.nullcontext()


def measured(
    make: Make, batch: torch.Tensor, choice: dict[str, Any], static: int, autocast: bool = False
) -> tuple[int, Log]:
    model = made(make)
    log = Log()
    cursor = Cursor(Route(choice), strict=True)
    watch_modules(model, cursor.enter, cursor.leave)
    torch.manual_seed(1)
    with AllocatorTimeline(base=static) as timeline:
        with casting(autocast), save_recompute_policy(cursor, log=log):
            out = model(batch)
            loss = scalar(out)
        loss.backward()
        del loss
    return timeline.peak_bytes, log


def save_sets(found: Profile, n: int) -> list[SaveSet]:
    graph = build(found)
    chance = random.Random(7)
    sets = [graph.everything, graph.must_save]
    for _ in range(n):
        probability = chance.choice([0.1, 0.3, 0.5, 0.7, 0.9])
        sets.append(frozenset(OpId(op.id) for op in graph.ops if chance.random() < probability))
    return [closed(graph, save_set) for save_set in sets]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("autocast", [False, True])
def test_predicted_peak_is_the_measured_one(case: str, autocast: bool) -> None:
    make, shape = CASES[case]
    if autocast and case in ("in place", "views"):
        pytest.skip("these models mix types by hand")
    batch = torch.randn(shape)
    with casting(autocast):
        found = profile(made(make), batch, loss=scalar)
    graph = build(found)
    for save_set in save_sets(found, 12):
        peak, log = measured(make, batch, decisions(found, save_set), found.static.total, autocast)
        predicted = simulate(graph, save_set).peak.live_bytes
        assert log.events == expected_log(graph, save_set)
        assert peak == predicted
