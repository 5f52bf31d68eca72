"""Compare ways to lay out the ranks of a job by the bytes of one rank. `compare_layouts` is the entry.

Each layout is a mesh of fake ranks, so nothing runs on a device, and no other rank exists. Communication has
no time there: layouts are compared by their bytes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from ac_client.fit import SizeSearch
from ac_client.profiled_sizes import ProfiledSizes
from autoac.planner import Constraints, InfeasibleBudget, SolverOutOfTime, bounds, build, find_minimum_peak
from autoac.planner.budget import budget_in_bytes
from autoac.profiler import Device, fake_ranks

if TYPE_CHECKING:
    import torch

REST = "dp"  # the dimension of all ranks that the layout does not name: each has samples of its own

MakeOnMesh = Callable[[int, Any], Any]
"""Takes a size and a DeviceMesh; returns the model and its batch, as for `autoac profile`."""


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """The step of rank 0 in one layout."""

    dimensions: Mapping[str, int]  # sizes of the mesh by name, `REST` first
    save_all_peak_bytes: int  # of the smallest size, with nothing recomputed
    smallest_peak_bytes: int  # of the smallest size, as far as it was found
    largest: int  # the largest size of a rank with a plan within the budget, as `fit` says; 0 if none has

    @property
    def largest_of_job(self) -> int:
        """Return the size of a step of all ranks."""
        return self.largest * self.dimensions[REST]


def layouts_of(ranks: int, sizes: Mapping[str, Iterable[int]]) -> list[dict[str, int]]:
    """Return a layout for each combination of the sizes of dimensions; the other ranks are data-parallel.

    >>> layouts_of(8, {"tp": (1, 4)})
    [{'dp': 8, 'tp': 1}, {'dp': 2, 'tp': 4}]

    Raises:
        ValueError: a combination does not divide `ranks`, or `sizes` names the dimension of the other ranks.
    """
    if REST in sizes:
        raise ValueError(f"layouts must leave {REST} out, which has the ranks that no other dimension has")
    found = []
    for combination in product(*sizes.values()):
        named = math.prod(combination)
        if named < 1 or ranks % named:
            words = " ".join(f"{name}={n}" for name, n in zip(sizes, combination, strict=True))
            raise ValueError(f"sizes of a layout must divide {ranks} ranks, got {words}")
        found.append({REST: ranks // named, **dict(zip(sizes, combination, strict=True))})
    return found


def compare_layouts(
    make: MakeOnMesh,
    budget_gb: float,
    layouts: Iterable[Mapping[str, int]],
    *,
    on: Device,
    multiple: int = 1,
    most: int | None = None,
    autocast: torch.dtype | None = None,
) -> list[LayoutRow]:
    """Return the layouts by their smallest peaks, the least first.

    Args:
        make: builds the model of rank 0 on a mesh with the names and sizes of a layout.
        budget_gb: GiB that may be live on a device at any moment of the step.
        layouts: sizes of a mesh by name, as `layouts_of` returns.
        on: the datasheet of the device.
        multiple, most, autocast: as for `fit`.

    Raises:
        InvalidBudget: the budget is not a positive number of GiB.
    """
    from torch.distributed.device_mesh import init_device_mesh

    budget, rows = budget_in_bytes(budget_gb), []
    for layout in layouts:
        with fake_ranks(math.prod(layout.values())):
            mesh = init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
            sizes = ProfiledSizes(lambda size: make(size, mesh), on, autocast)  # noqa: B023 - gone after this turn
            smallest = sizes.profile(multiple)
            constraints = Constraints(gradients="as profiled" if sizes.accumulates == 0 else "present")
            try:
                largest = SizeSearch(sizes, budget, constraints, multiple, most).largest()[0] * multiple
            except (InfeasibleBudget, SolverOutOfTime):
                largest = 0
        ceiling, minimum = bounds(build(smallest)).ceiling, find_minimum_peak(smallest).found
        rows.append(LayoutRow(layout, ceiling, minimum, largest))
    return sorted(rows, key=lambda row: row.smallest_peak_bytes)
