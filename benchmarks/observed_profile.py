"""The profile of an observed step next to that of a fake one, column by column, on every model here.

    python -m benchmarks.observed_profile [--only PATTERN] [--out FILE]

The fake step is that of a CPU. Columns that differ are listed, those of run times aside, and by how much four
peaks differ: of a step that saves everything, nothing that it may recompute, and two halves. What differs for
a known reason:

- Workspaces and temporaries of kernels, which a fake step does not see.
- A number that becomes a tensor (`x[0] = 1`), 8 bytes, may count for one op less.
- oneDNN's LSTM, whose fake kernel has no workspace.

A model that has no fake step is said to be refused.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy
import torch
from torch import nn

from autoac.planner import Profile, build
from autoac.planner.memory.simulate import peak_bytes
from autoac.profiler import CannotFake, Device, KernelKind, profile
from benchmarks.models.batches import Batch
from benchmarks.observed_step import CASES
from benchmarks.results import bench_parser, chosen, markdown_table, shown, write_result

OTHERS = ("runtime_us", "spread_us", "notes")
"""Times, and notes on them."""
IN_KERNELS = ("environment.", "ops.workspace_nbytes")
"""Columns that a fake step leaves out, or has of another device."""
IN_BACKWARD = ("backward.", "saved.dropped", "outputs.released", "temporaries.", "nodes", "ops.other_nbytes")
"""Columns that the known reasons change."""
A_CPU = Device(
    "a CPU",
    {torch.float32: 1e12},
    1e12,
    1e9,
    2**30,
    launch_us=1.0,
    efficiency=dict.fromkeys(KernelKind, 1.0),
    device_type="cpu",
    allocator_rounding=1,
)
"""A device with 1,000 bytes or 10**6 operations per microsecond."""


def columns(found: Profile) -> dict[str, Any]:
    """Return the columns of a profile by name. Storages that forward does not release are released alike."""
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


def differing(first: Profile, second: Profile, *skipped: str) -> list[str]:
    """Return the names of the columns that differ, without those that begin with one of `skipped`."""
    a, b = columns(first), columns(second)
    names = [name for name in {**a, **b} if not name.endswith(OTHERS) and not name.startswith(skipped)]
    return [name for name in names if a.get(name) != b.get(name)]


def peaks(found: Profile) -> list[int]:
    """Return the peaks with everything saved, nothing that may be recomputed, and two halves of that."""
    graph = build(found)
    free = sorted(graph.everything - graph.must_save)
    dropped = [frozenset[int](), frozenset(free), frozenset(free[::2]), frozenset(free[1::2])]
    return [peak_bytes(graph, graph.everything - one) for one in dropped]


def seed_everything() -> None:
    """Seed the generators by which a model chooses the layers that it skips."""
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)


def compare(name: str, make: Callable[[], tuple[nn.Module, Batch]]) -> list[str]:
    """Return the row of one model."""
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    seed_everything()
    try:
        fake = profile(model, **batch, on=A_CPU)
    except (CannotFake, RuntimeError) as error:  # torch's fake kernels refuse some types
        return [name, "", f"refused: {str(error).splitlines()[0][:80]}", ""]
    seed_everything()
    observed = profile(model, **batch)
    apart = max(abs(a / b - 1) for a, b in zip(peaks(fake), peaks(observed), strict=True))
    found = differing(observed, fake, *IN_KERNELS)
    return [name, str(len(observed.ops)), ", ".join(found), f"{apart:.2%}"]


def main() -> None:
    """Compare, and print the table."""
    options = bench_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    rows = shown((compare(name, CASES[name]) for name in chosen(CASES, options.only)), list)
    refused = sum(not row[1] for row in rows)
    head = ("model", "ops", "columns that differ", "peaks apart")
    write_result(f"{len(rows)} models, {refused} refused.\n\n{markdown_table(head, rows)}", options.out)


if __name__ == "__main__":
    main()
