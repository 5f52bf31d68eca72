"""Loops in which further forwards run before the backward of one: all are planned like that one."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from blocks import WithLoss
from stepping import measured, same_gradients
from torch import Tensor, nn

import ac_client
from autoac.planner import Profile, find_minimum_peak
from autoac.planner.problem.microbatch import microbatch_of
from autoac.planner.units import GIB
from autoac.profiler import observe

ROWS, WIDTH = 128, 32

ORDERS = {
    "1F1B": "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
    "1F1B, three in flight": "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
    "one after the other": "F0 F1 F2 F3 B0 B1 B2 B3",
    "the last one first": "F0 F1 F2 B2 B1 B0",
}


def step(model: nn.Module, order: str, number: int, rows: tuple[int, ...] = ()) -> None:
    """Train one step without its optimizer, in which each batch is made for its forward."""
    generator = torch.Generator().manual_seed(number)
    model.zero_grad()
    torch.manual_seed(number)
    losses: dict[int, Tensor] = {}
    for action in order.split():
        i = int(action[1])
        if action[0] == "F":
            losses[i] = model(torch.randn(rows[i] if rows else ROWS, WIDTH, generator=generator))
        else:
            losses.pop(i).backward()


def planned(order: str, budget_gb: float) -> nn.Module:
    model = ac_client.apply(WithLoss(), budget_gb)
    for number in range(3):
        step(model, order, number)
    return model


def budgets(order: str, *shares: float) -> Iterator[float]:
    """Yield budgets at shares of the way from the smallest peak to that with nothing recomputed, in GiB."""
    plan = ac_client.applied(planned(order, 1.0)).plan
    assert plan.policy().recomputed == 0
    smallest, most = find_minimum_peak(plan.graph).found, plan.policy().predicted.save_all_peak_bytes
    yield from ((smallest + share * (most - smallest)) / GIB for share in shares)


@pytest.mark.parametrize("name", ORDERS)
def test_what_waits_is_planned_like_the_microbatch_at_work(name: str) -> None:
    order = ORDERS[name]
    in_flight = order.split().index(next(action for action in order.split() if action[0] == "B"))
    parameters = sum(p.nbytes for p in WithLoss().parameters())
    for budget_gb in budgets(order, 0.0, 0.95):
        model, plain = planned(order, budget_gb), WithLoss()
        for number in range(3):
            step(plain, order, number)
            step(model, order, number)
            assert same_gradients(model, plain)
        report, policy = measured(model, lambda one: step(one, order, 3)), ac_client.applied(model).policy
        assert policy.predicted.microbatches == in_flight
        assert len(policy.forwards) == 1
        # Where no forward follows the first backward, all wait before there are gradients, or after.
        room = 0 if name.startswith("1F1B") else parameters
        assert 0 <= report.predicted_peak_bytes - report.measured_peak_bytes <= room
        assert report.measured_peak_bytes <= budget_gb * GIB
        assert policy.recomputed > 0


def test_more_in_flight_than_before_are_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ac_client")
    model, plain = ac_client.apply(WithLoss(), 340_000 / GIB), WithLoss()
    found = []
    for number, order in enumerate(["F0 F1 B0 B1"] * 2 + [ORDERS["one after the other"]] * 3):
        step(model, order, number)
        step(plain, order, number)
        assert same_gradients(model, plain)
        policy = ac_client.applied(model).policy
        found.append(policy.predicted.microbatches)
    assert found == [2, 2, 4, 4, 4]
    assert [record.getMessage().partition(": this")[0] for record in caplog.records] == [
        "WithLoss: 3 forwards wait for one backward, and the plan is for 2"
    ]
    report = measured(model, lambda one: step(one, ORDERS["one after the other"], 5))
    assert report.measured_peak_bytes <= 340_000


@pytest.mark.parametrize(("second", "counted"), [(ROWS // 2, 3), (ROWS, 4)])
def test_microbatches_of_other_sizes_wait_with_their_bytes(second: int, counted: int) -> None:
    model = ac_client.apply(WithLoss(), 340_000 / GIB)
    rows = (ROWS, second, ROWS // 2, ROWS // 4)
    for number in range(3):
        step(model, ORDERS["one after the other"], number, rows)
    assert ac_client.applied(model).policy.predicted.microbatches == counted
    report = measured(model, lambda one: step(one, ORDERS["one after the other"], 3, rows))
    assert report.recomputed
    assert report.measured_peak_bytes <= report.predicted_peak_bytes


def test_forwards_that_wait_for_a_backward_of_others_are_saved() -> None:
    model, plain = ac_client.apply(WithLoss(), 700_000 / GIB), WithLoss()

    def pairs(trained: nn.Module, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        torch.manual_seed(number)
        trained.zero_grad()
        losses = [trained(torch.randn(ROWS, WIDTH, generator=generator)) for _ in range(4)]
        (losses.pop(0) + losses.pop(0)).backward()
        (losses.pop(0) + losses.pop(0)).backward()

    for number in range(3):
        pairs(model, number)
        pairs(plain, number)
        assert same_gradients(model, plain)
    policy = ac_client.applied(model).policy
    first, second, third, fourth = (set(decisions.values()) for decisions in policy.forwards)
    assert first | second == {"save", "recompute"}
    assert third | fourth == {"save"}


def test_profile_of_a_microbatch_is_one_of_a_step_that_finds_gradients() -> None:
    """Compare the cut of a first microbatch with a step by itself whose gradients exist."""
    plan = ac_client.applied(planned(ORDERS["1F1B"], 1.0)).plan
    assert plan.profile is not None
    cut, alone = plan.profile, observe(WithLoss(), (torch.randn(ROWS, WIDTH),), {}, accumulates=True)
    assert microbatch_of(cut) is cut
    assert cut.static == alone.static
    assert cut.saved.value == alone.saved.value
    assert cut.values == alone.values
    waiting = 4 * ROWS * WIDTH  # bytes of the batch of the other one
    ours, theirs = ([other for unpacks, other in _steps(one) if unpacks] for one in (cut, alone))
    assert {a - b for a, b in zip(ours, theirs, strict=True)} == {waiting}


def _steps(profile: Profile) -> Iterator[tuple[tuple[int, ...], int]]:
    return zip(profile.backward.unpacks.rows(), profile.backward.other_nbytes, strict=True)
