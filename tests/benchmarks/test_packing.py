"""Check the rows of the benchmark of packing on a small model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoac.planner import Profile, bounds, build
from autoac.planner.solver.variables import Options
from autoac.profiler import profile
from benchmarks.models.batches import ModelAndBatch
from benchmarks.packing.steps import Row, peak_of, plan_within, planned, time_steps
from benchmarks.packing.upper_bound import kind_of


class Blocks(nn.Module):
    """Linear layers with a dropout after each; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = functional.dropout(layer(x).tanh(), 0.1, self.training)
        return {"loss": x.square().mean()}


def blocks() -> ModelAndBatch:
    torch.manual_seed(0)
    return Blocks(), {"x": torch.randn(2000, 64)}


def where_packing_pays(taken: Profile) -> Profile:
    """Return the profile with times that make every machine pack: 1 us to pack, 100 us for each op."""
    ops = taken.ops.model_copy(update={"runtime_us": (100.0,) * len(taken.ops.runtime_us)})
    fast = (1.0,) * len(taken.packable.value)
    packable = taken.packable.model_copy(update={"pack_us": fast, "unpack_us": fast})
    return taken.model_copy(update={"ops": ops, "packable": packable})


def test_peaks_of_planned_steps_with_bits_are_as_predicted() -> None:
    model, batch = blocks()
    taken = where_packing_pays(profile(model, **batch))
    budget = int(0.85 * bounds(build(taken)).ceiling)
    without, packed = (planned(plan_within(taken, Options(packing=p), budget)) for p in (False, True))
    assert without.masks == 0 < packed.masks
    row = Row("blocks", budget, len(taken.packable), without, packed)
    for subject in (row.without, row.packed):
        subject.measured = peak_of(blocks, subject)
    time_steps(blocks, row, rounds=1)
    assert row.without.holds
    assert row.packed.holds
    assert row.packed.recompute_us < row.without.recompute_us


def test_the_kinds_of_saved_tensors() -> None:
    mask = functional.dropout(torch.ones(64), 0.5)
    tensors = [mask, mask.bool(), mask.long(), torch.randn(64), torch.zeros(8, dtype=torch.uint8)]
    assert [kind_of(tensor) for tensor in tensors] == ["masks", "bool", "integers", "other", "other"]
