"""Test that the profile of a real step, which recomputes, equals that of a fake one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoac.profiler import CannotProfile, Loop, observe, profile
from benchmarks.models.modules import Transformer
from benchmarks.observed_profile import A_CPU, IN_BACKWARD, IN_KERNELS, differing
from tests.programs import COLUMNS, ROWS, Program

pytestmark = pytest.mark.usefixtures("one_thread")


class Run(nn.Module):
    """A random program as a model."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return self.program.run(list(inputs))


def test_observed_step_of_a_random_program_has_its_profile() -> None:
    compared = 0
    for seed in range(24):
        model = Run(Program(seed, 30))
        torch.manual_seed(seed)
        batch = [torch.randn(ROWS, COLUMNS, requires_grad=True) for _ in range(2)]
        batch.append(torch.randn(ROWS, COLUMNS))
        try:
            torch.manual_seed(seed)
            fake = profile(model, *batch, on=A_CPU)
        except (RuntimeError, CannotProfile):
            continue  # autograd refuses the program
        torch.manual_seed(seed)
        observed = profile(model, *batch)
        assert not differing(observed, fake, *IN_BACKWARD, *IN_KERNELS), seed
        compared += 1
    assert compared > 7


def loss_of_logits(out: dict[str, Tensor]) -> Tensor:
    return (out["logits"].tanh() - 1).square().mean()


def loss_of_all(outs: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([loss_of_logits(out) for out in outs]).mean()


LOOPS: dict[str, dict[str, Any]] = {
    "loss": {"loss": loss_of_logits},
    "accumulates": {"accumulates": True},
    "accumulates a loss": {"loss": loss_of_logits, "accumulates": True},
    "two forwards": {"loop": Loop(2)},
    "three forwards, one loss": {"loop": Loop(3), "loss": loss_of_all},
    "dropped outputs": {"loop": Loop(2, drops=frozenset({0}))},
}


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("name", LOOPS)
def test_observed_step_of_a_loop_has_the_profile_of_a_fake_one(name: str, *, casts: bool) -> None:
    model, x, terms = Transformer(), torch.randn(2, 8, 32), LOOPS[name]
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        fake = observe(model, (x,), {}, on=A_CPU, **terms)
        observed = observe(model, (x,), {}, **terms)
    assert not differing(observed, fake, *IN_BACKWARD, *IN_KERNELS)
    assert observed.loss_begins == fake.loss_begins
