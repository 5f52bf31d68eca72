"""Layouts of ranks are compared by bytes that each has in a profile of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from blocks import Residual
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ac_client.layouts import REST, LayoutRow, compare_layouts, layouts_of
from autoac.planner import Constraints, InfeasibleBudget, Profile, bounds, build, find_minimum_peak, plan
from autoac.planner.units import GIB
from autoac.profiler import DATASHEETS, fake_ranks, observe

RANKS = 8
MOST = 64
BUDGET = 76 << 20


def make(size: int, mesh: Any) -> Any:
    model = nn.Sequential(Residual(256), Residual(256))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, torch.empty(size * 64, 256)


def profile_of(row: LayoutRow, size: int) -> Profile:
    with fake_ranks(RANKS):
        mesh = init_device_mesh("cpu", tuple(row.dimensions.values()), mesh_dim_names=tuple(row.dimensions))
        model, x = make(size, mesh)
        return observe(model, (x,), {}, on=DATASHEETS["h100"])


def test_bytes_of_a_layout_are_those_of_the_profile_of_its_rank() -> None:
    rows = compare_layouts(
        make, BUDGET / GIB, layouts_of(RANKS, {"tp": (1, 4)}), on=DATASHEETS["h100"], most=MOST
    )
    peaks = [row.smallest_peak_bytes for row in rows]
    assert peaks == sorted(peaks)
    assert len(set(peaks)) == 2
    for row in rows:
        smallest = profile_of(row, 1)
        assert row.save_all_peak_bytes == bounds(build(smallest)).ceiling
        assert row.smallest_peak_bytes == find_minimum_peak(smallest).found
        assert 1 < row.largest < MOST
        assert row.largest_of_job == row.largest * row.dimensions[REST]
        assert plan(profile_of(row, row.largest), budget_bytes=BUDGET, gap=1.0).peak <= BUDGET
        adding = Constraints(gradients="present")  # as nobody says that there are none
        with pytest.raises(InfeasibleBudget):
            plan(profile_of(row, row.largest + 1), budget_bytes=BUDGET, gap=1.0, constraints=adding)


def test_no_size_fits_a_budget_below_the_smallest_peak() -> None:
    (row,) = compare_layouts(make, 1e-3, layouts_of(RANKS, {"tp": (2,)}), on=DATASHEETS["h100"], most=MOST)
    assert (row.largest, row.largest_of_job) == (0, 0)


@pytest.mark.parametrize("sizes", [{"tp": (1, 3)}, {"tp": (4,), "cp": (4,)}, {"dp": (2,)}, {"tp": (0,)}])
def test_layouts_have_all_ranks(sizes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"must leave dp out|must divide 8 ranks"):
        layouts_of(RANKS, sizes)


def test_layouts_are_all_combinations() -> None:
    found = layouts_of(RANKS, {"tp": (1, 2), "cp": (2, 4)})
    assert found[0] == {"dp": 4, "tp": 1, "cp": 2}
    assert [tuple(each.values()) for each in found] == [(4, 1, 2), (2, 1, 4), (2, 2, 2), (1, 2, 4)]
