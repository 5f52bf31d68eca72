"""Test that the profile of a real step, which recomputes, equals that of a hollow step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.profiler import CannotProfile, profile
from autoac.profiler.torch_facts.gradients import roots_of
from benchmarks.models.tiny import IRREGULAR, ZOO, ZooModel
from benchmarks.observed_profile import IN_BACKWARD, differing, observe_step, peaks
from tests.programs import COLUMNS, ROWS, Program

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SCALARS = {"T5": 8, "Whisper": 8}
"""Bytes of a number that becomes a tensor, as in `x[0] = 1`, which may count for one op less."""


class Run(nn.Module):
    """A random program as a model."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return self.program.run(list(inputs))


@pytest.mark.parametrize("entry", [*ZOO, *IRREGULAR], ids=lambda entry: entry.name)
def test_observed_step_has_the_profile_of_a_hollow_step(entry: ZooModel) -> None:
    model = entry.make().train()
    hollow = profile(model, **entry.batch())
    observed = observe_step(model, (), entry.batch(), device=CPU)
    scalars = SCALARS.get(entry.name, 0)
    assert not differing(observed, hollow, *IN_BACKWARD)
    assert peaks(observed) == pytest.approx(peaks(hollow), abs=scalars)


@pytest.mark.parametrize("entry", ZOO[:8], ids=lambda entry: entry.name)
def test_peak_of_a_second_backward_follows_from_the_profile_of_the_first(entry: ZooModel) -> None:
    model = entry.make().train()
    found = observe_step(model, (), entry.batch(), device=CPU).with_retained_graph()
    assert peaks(found) == peaks(found.with_retained_graph())
    model.zero_grad()
    model(**entry.batch())  # what a first forward alone makes
    batch = entry.batch()
    torch.manual_seed(0)
    with AllocatorTimeline(base=found.static.total) as timeline:
        output = model(**batch)
        roots = [root for root in roots_of(output) if root.requires_grad]
        for _ in range(2):
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots], retain_graph=True)
    # The first backward has dropped numbers that became tensors, and the next ones do not.
    assert peaks(found)[0] in range(timeline.peak_bytes - 64, round(1.01 * timeline.peak_bytes))


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_observed_step_of_a_random_program_has_its_profile(first: int) -> None:
    compared = 0
    for seed in range(first, first + 50):
        model = Run(Program(seed, 30))
        torch.manual_seed(seed)
        batch = [torch.randn(ROWS, COLUMNS, requires_grad=True) for _ in range(2)]
        batch.append(torch.randn(ROWS, COLUMNS))
        try:
            torch.manual_seed(seed)
            hollow = profile(model, *batch)
        except (RuntimeError, CannotProfile):
            continue  # autograd refuses the program
        torch.manual_seed(seed)
        observed = observe_step(model, batch, {}, device=CPU)
        assert not differing(observed, hollow, *IN_BACKWARD), seed
        assert peaks(observed) == peaks(hollow), seed
        compared += 1
    assert compared > 25
