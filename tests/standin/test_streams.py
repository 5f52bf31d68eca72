"""Test that nothing races if a forward uses several streams and parts of it are recomputed."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from fuzzers.stream_programs import compare
from stepping import EventLog, recomputed
from torch import Tensor

from autoac.tape.runtime import region
from autoac.tape.runtime.policy_context import save_recompute_policy
from autoac.tape.torch_facts.streams import streams_seen

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")


def read_on_both(side: torch.cuda.Stream, x: Tensor, w: Tensor) -> Tensor:
    """Read an intermediate tensor on the current stream and on `side`."""
    main = torch.cuda.current_stream()
    a = (x * w).exp()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        b = a.sin().sin() * w
    a.record_stream(side)
    c = a.cos().cos() * w
    main.wait_stream(side)
    b.record_stream(main)
    return b.sum() + c.sum()


def gradients(policy: object, log: EventLog | None = None) -> list[Tensor]:
    x, w = (torch.linspace(-1, 1, 4, device="cuda").requires_grad_() for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    w.record_stream(side)
    if policy is None:
        read_on_both(side, x, w).backward()
    else:
        with save_recompute_policy(policy, log=log):
            loss = read_on_both(side, x, w)
        loss.backward()
    return [x.grad.cpu(), w.grad.cpu()]


def test_tensor_that_another_stream_reads_is_saved(gpu: ModuleType) -> None:
    log = EventLog()
    planned = gradients("recompute_all", log)
    assert gpu.take_races() == []
    assert all(map(torch.equal, planned, gradients(None)))
    again = recomputed(log)
    assert "aten.exp.default" not in again
    assert again.count("aten.sin.default") == 2, "on the side stream"
    assert again.count("aten.cos.default") == 2, "on the main stream"


def test_recompute_that_ignores_streams_would_race(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device must be able to tell."""
    gradients("recompute_all")  # the first comparison of an op's contents waits for all streams
    gpu.take_races()
    monkeypatch.setattr(streams_seen, "several", False)
    monkeypatch.setattr(region, "has_streams", lambda: False)
    planned = gradients("recompute_all")
    assert any("aten::exp" in race for race in gpu.take_races())
    assert any(gradient.isnan().any() for gradient in planned)


def test_record_stream_is_not_a_write(gpu: ModuleType) -> None:
    log = EventLog()
    x = torch.ones(4, device="cuda", requires_grad=True)
    with save_recompute_policy("recompute_all", log=log):
        y = x.exp()
        y.record_stream(torch.cuda.Stream())
        z = y.sin().sum()
    z.backward()
    assert log.events.count(("recompute", "aten.exp.default")) == 1
    assert not any("record_stream" in name for _, name in log.events)


@pytest.mark.parametrize("seed", [20, 22, 24, 28, 30, 31, 34, 35, 45, 50, 70, 80, 85, 90, 95])
def test_random_program_on_several_streams_has_the_plain_results_and_the_predicted_peak(
    gpu: ModuleType, seed: int
) -> None:
    found = compare(seed, planned=seed % 5 == 0, take_races=gpu.take_races)
    assert not found.skipped
    assert not found.mismatches
