"""A device that models divide: their plans leave room for one another, where each alone would take it all."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ac_client
from ac_client.measure.memory_timeline import AllocatorTimeline
from ac_client.planning.facts.device_share import with_share
from autoac.planner import build, plan
from autoac.planner.memory.simulate import waiting_bytes
from autoac.planner.units import GIB
from autoac.profiler import observe

WIDTH, ROWS = 32, 512


class Part(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def one_after_the_other(parts: list[Part]) -> None:
    """Run the second part while the first one waits."""
    parts[1](parts[0](batch())).square().mean().backward()


def stages(parts: list[Part]) -> None:
    """Run three microbatches, whose backwards go through one part at a time."""
    waiting = []
    for _ in range(3):
        sent = parts[0](batch())
        received = sent.detach().requires_grad_()
        waiting.append((sent, received, parts[1](received).square().mean()))
    while waiting:
        sent, received, loss = waiting.pop(0)
        loss.backward()
        sent.backward(received.grad)


def batch() -> Tensor:
    return torch.ones(ROWS, WIDTH)


def peak_of(step: Callable[[list[Part]], None], parts: list[Part]) -> int:
    standing = sum(p.nbytes for part in parts for p in part.parameters())
    with AllocatorTimeline(base=standing) as timeline:
        step(parts)
    gradients(parts)
    return timeline.peak_bytes


def gradients(parts: list[Part]) -> list[Tensor]:
    """Return the gradients, and free them."""
    made = [p.grad for part in parts for p in part.parameters() if p.grad is not None]
    for part in parts:
        part.zero_grad()
    return made


def made() -> list[Part]:
    torch.manual_seed(0)
    return [Part(4), Part(4)]


@pytest.mark.parametrize(("step", "tightness"), [(one_after_the_other, 0.5), (stages, 0.4)])
def test_models_that_wait_for_each_other_keep_a_budget_of_their_device(
    step: Callable[[list[Part]], None], tightness: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The first model alone fits with little to recompute, and leaves the second no room."""
    plain, parts = made(), made()
    budget = int(tightness * peak_of(step, plain))
    for part in parts:
        ac_client.apply(part, budget / GIB)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):  # one model is observed at a time
            step(parts)
            found = gradients(parts)
    step(plain)
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(plain), strict=True))
    assert peak_of(step, parts) <= budget
    assert not [message for message in caplog.messages if "cannot be kept" in message]
    reports = [ac_client.applied(part).report() for part in parts]
    assert all(report.predicted_peak_bytes <= budget for report in reports)


def test_share_of_the_device_limits_what_waits_and_is_not_predicted() -> None:
    part = Part(4)
    profile = observe(part, (batch(),), {})
    graph = build(profile)
    least, most = waiting_bytes(graph, frozenset()), waiting_bytes(graph, graph.everything)
    budget = 2 * plan(graph, budget_gb=1).peak
    for share in (0.25, 0.5):
        limited = plan(with_share(profile, share, budget), budget_bytes=budget)
        assert waiting_bytes(graph, limited.save_set) <= least + share * (most - least)
    assert plan(profile, budget_bytes=budget).recompute_us == 0
