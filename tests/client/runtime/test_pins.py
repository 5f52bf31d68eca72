"""Test pins in regions and in plans."""

from __future__ import annotations

import pytest
import torch
from stepping import EventLog, recomputed, same_gradients
from torch import Tensor, nn

import ac_client
from ac_client import PinConflict, PolicyConflict, pin, save_recompute_policy
from autoac.planner import ConflictingPins, Stopped, build, plan
from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import peak_bytes
from autoac.profiler import profile
from autoac.tape.torch_facts.module_pins import pins_of


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh())


def model() -> nn.Sequential:
    return nn.Sequential(*(block() for _ in range(6)))


def recomputed_by(net: nn.Module, x: Tensor, policy: object) -> list[str]:
    log = EventLog()
    with save_recompute_policy(policy, log=log):
        out = net(x)
    out.square().sum().backward()
    return recomputed(log)


def test_pinned_module_is_saved_in_a_region_that_recomputes() -> None:
    net, x = model(), torch.randn(4, 16)
    everything = len(recomputed_by(net, x, "recompute_all"))
    pinned = pin(net[2], "must_save")
    assert len(recomputed_by(net, x, "recompute_all")) == everything - 4
    pinned.remove()
    assert len(recomputed_by(net, x, "recompute_all")) == everything


def test_pins_accept_the_decisions_of_a_policy_file() -> None:
    net, x = model(), torch.randn(4, 16)
    everything = len(recomputed_by(net, x, "recompute_all"))
    pin(net[2], "save")
    assert len(recomputed_by(net, x, "recompute_all")) == everything - 4
    pin(net[3], "recompute")
    assert pins_of(net)["3"] == "must_recompute"


def test_policy_that_contradicts_a_pin_is_an_error_that_names_both() -> None:
    net, x = model(), torch.randn(4, 16)
    pin(net[2], "must_recompute")
    expected = (
        r"MUST_SAVE by .*must_save_all.*MUST_RECOMPUTE by the pin must_recompute of Sequential \(.*test_pins"
    )
    with pytest.raises(PolicyConflict, match=expected), save_recompute_policy("must_save_all"):
        net(x)
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_plans_obey_pins(share: float) -> None:
    net, x = model(), torch.randn(256, 16)
    pin(net[1], "must_save")
    pin(net[4], "must_recompute")
    found = profile(net, x)
    graph = build(found)
    smallest, largest = 0.0, float(peak_bytes(graph, graph.everything))
    smallest = peak_bytes(graph, frozenset(op.id for op in graph.ops if op.must_save or op.id % 5 == 0))
    made = plan(found, budget_bytes=int(max(smallest, 0) + share * (largest - smallest)))
    decisions = made.policy().decisions
    assert {d for key, d in decisions.items() if key.startswith("1.")} == {"save"}
    assert {d for key, d in decisions.items() if key.startswith("4.")} == {"recompute"}
    assert made.recompute_us >= recompute_us(graph, graph.everything) > 0
    assert made.stopped is Stopped.OPTIMAL


def in_place() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(inplace=True), nn.Linear(64, 16))


def test_pin_on_an_in_place_module_also_pins_what_it_overwrites() -> None:
    x = torch.randn(256, 16)
    torch.manual_seed(0)
    plain, planned = in_place(), in_place()
    planned.load_state_dict(plain.state_dict())
    pin(planned[1], "must_recompute")
    ac_client.apply(planned, budget_gb=1.0)
    for net in (plain, planned, planned):
        net.zero_grad()
        net(x).square().sum().backward()
    applied = ac_client.applied(planned)
    assert applied.report().recomputed == 2
    assert applied.policy.decisions["1/aten.relu_.default#0"] == "recompute"
    assert applied.policy.decisions["0/aten.addmm.default#0"] == "recompute"
    assert same_gradients(planned, plain)


def test_recomputing_pin_that_overwrites_a_pinned_save_is_an_error_that_names_both() -> None:
    net = in_place()
    pin(net[0], "must_save")
    pin(net[1], "must_recompute")
    ac_client.apply(net, budget_gb=1.0)
    net(torch.randn(4, 16)).sum().backward()
    net.zero_grad()
    with pytest.raises(
        ConflictingPins, match=r"1/aten.relu_.default#0.*must_recompute; pinned \(of 0/aten.addmm"
    ):
        net(torch.randn(4, 16))


def test_contradicting_pins_are_an_error_that_names_both() -> None:
    net = model()
    pin(net, "must_save")
    pin(net[2], "must_recompute")
    with pytest.raises(PinConflict, match=r"2 is pinned must_recompute inside \., which is pinned must_save"):
        profile(net, torch.randn(4, 16))


def test_only_a_must_can_be_pinned() -> None:
    with pytest.raises(ValueError, match="got 'prefer_save'"):
        pin(model(), "prefer_save")
