"""Test that the profile of a real step, which recomputes, equals that of a hollow step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ac_client.observing.observed_step import observe_step
from autoac.planner import Profile, build
from autoac.planner.memory.simulate import peak_bytes
from autoac.profiler import CannotProfile, profile
from benchmarks.models.tiny import IRREGULAR, ZOO, ZooModel
from tests.programs import COLUMNS, ROWS, Program

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
OTHERS = ("runtime_us", "spread_us", "replay_us", "notes", "kept_nbytes")
"""Times; and what is alive when backward returns, which has the gradients that backward starts from."""
IN_BACKWARD = ("backward.", "saved.dropped", "outputs.released", "temporaries.", "nodes")
"""Where a hollow step has copies of its own: of integers that autograd saves, of the generator's state."""
SCALARS = {"T5": 8, "Whisper": 8}
"""Bytes of a number that becomes a tensor, as in `x[0] = 1`, which may count for one op less."""


def columns(found: Profile) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, item in value.items():
                add(f"{prefix}.{name}" if prefix else name, item)
        else:
            flat[prefix] = value

    add("", found.model_dump())
    in_forward = [min(moment, len(found.ops)) for moment in found.storages.released]
    return flat | {"storages.released": in_forward}


def differing(observed: Profile, hollow: Profile, *skipped: str) -> list[str]:
    a, b = columns(observed), columns(hollow)
    names = [name for name in {**a, **b} if not name.endswith(OTHERS) and not name.startswith(skipped)]
    return [name for name in names if a.get(name) != b.get(name)]


def peaks(found: Profile) -> list[int]:
    """Return the peaks with everything saved, with everything recomputed that may be, and with half saved."""
    graph = build(found)
    free = sorted(graph.everything - graph.must_save)
    dropped = [frozenset[int](), frozenset(free), frozenset(free[::2]), frozenset(free[1::2])]
    return [peak_bytes(graph, graph.everything - one) for one in dropped]


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
    assert not differing(observed, hollow, *IN_BACKWARD, *(["ops.other_nbytes"] if scalars else []))
    assert peaks(observed) == pytest.approx(peaks(hollow), abs=scalars)


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
