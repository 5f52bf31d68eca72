"""Test that `plan_for` runs one real step, and what is then as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from awkward_modules import ConvNet
from ranks import outputs_of_ranks
from torch import Tensor, nn

import ac_client
from autoac.profiler import ProfilerBusy


class Counting(nn.Module):
    """Count forwards, and draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = ConvNet(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.dropout(self.inner(x), 0.1).square().mean()


def batch(rows: int) -> Tensor:
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(rows))


def trained(model: Counting, *, plans: bool) -> list[Tensor]:
    """Train four steps, two of them on each gradient; return all numbers of each step."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    numbers: list[Tensor] = []
    for step in range(4):
        if plans and step < 3:
            ac_client.applied(model).plan_for(batch(8 + step))
        loss = model(batch(4))
        loss.backward()
        numbers += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        numbers += [buffer.clone() for buffer in model.buffers()]
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return numbers


def test_training_goes_on_as_if_plan_for_had_not_been_called() -> None:
    torch.manual_seed(0)
    plain = Counting()
    torch.manual_seed(0)
    planned = ac_client.apply(Counting(), 1.0)
    expected = trained(plain, plans=False)
    assert all(map(torch.equal, trained(planned, plans=True), expected))
    assert planned.calls >= plain.calls + 3


def test_plan_for_runs_the_forward_once_and_calls_no_optimizer_in_backward() -> None:
    planned = ac_client.apply(Counting(), 1.0)
    stepped: list[Tensor] = []
    for parameter in planned.parameters():
        parameter.register_post_accumulate_grad_hook(stepped.append)
    policy = ac_client.applied(planned).plan_for(batch(8))
    assert planned.calls == 1
    assert not stepped
    assert all(parameter.grad is None for parameter in planned.parameters())
    assert policy.predicted.peak_bytes > 0


def test_plan_for_in_an_observed_step_is_refused_and_the_step_goes_on() -> None:
    planned = ac_client.apply(Counting(), 1.0, group=None)
    loss = planned(batch(4))
    with pytest.raises(ProfilerBusy):
        ac_client.applied(planned).plan_for(batch(8))
    loss.backward()
    assert ac_client.applied(planned).policy is not None


RANKS = """
import ac_client
from torch.nn.parallel import DistributedDataParallel
from awkward_modules import ConvNet

torch.manual_seed(0)
inner = ac_client.apply(ConvNet(), 1.0)
model = DistributedDataParallel(inner)
for i in range(4):
    if PLANS and i != 1:
        ac_client.applied(inner).plan_for(torch.randn(8 + i, 3, 8, 8))
    torch.manual_seed(10 * i + rank)
    model(torch.randn(4, 3, 8, 8)).sum().backward()
print([p.grad.sum().item() for p in model.parameters()], [b.sum().item() for b in model.buffers()])
"""


def test_ranks_that_call_plan_for_together_train_as_ranks_that_do_not(tmp_path: Path) -> None:
    planned = outputs_of_ranks(RANKS.replace("PLANS", "True"), tmp_path / "planned")
    assert planned == outputs_of_ranks(RANKS.replace("PLANS", "False"), tmp_path / "plain") != ["", ""]
