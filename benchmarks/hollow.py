"""What a profile costs: memory and time, of hollow profiles and of a fake one -> docs/profile-cost.md.

    python -m benchmarks.hollow [--only GPT-2] [--pairs 5]

Models of models/medium.py, each in a process of its own, on one thread. *Memory*: the allocator's record of a
hollow step, beside that of a plain one, both above what was there before, gradients included; and what the
neediest node of backward takes by itself, which no step that runs its kernel can do without. *Time*: plain
steps and whole profiles take turns; the median of the ratios is quoted, in CPU time of the thread, which
other processes do not add to. *Fake*: a 32-layer Llama 3 8B on the meta device for an H100, twice
in a process that has imported everything, in CPU seconds of all its threads; resident memory is the kernel's
own count, imports included.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from ac_client.files import write_whole
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import Profile
from autoac.planner.units import format_bytes
from autoac.profiler import DATASHEETS, profile
from autoac.profiler.steps import hollow
from benchmarks.models import medium
from benchmarks.models.large import llama
from benchmarks.peak import alone
from benchmarks.recompute_time import seconds

TABLE = Path(__file__).parents[1] / "docs" / "profile-cost.md"
PAIRS = 5
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Row:
    """What a hollow profile of a model costs beside a plain step."""

    model: str
    plain_nbytes: int  # at most, above what was there before
    hollow_nbytes: int
    node_nbytes: int  # most that one node of backward takes: see `neediest`
    plain_s: float
    ratios: Sequence[float]  # of the time of a profile and that of a plain step, of each pair

    @property
    def memory(self) -> float:
        return self.hollow_nbytes / self.plain_nbytes

    @property
    def time(self) -> float:
        return statistics.median(self.ratios)


@dataclass(frozen=True, slots=True)
class Fake:
    """What fake profiles of Llama 3 8B cost, one after the other."""

    ops: int
    seconds: Sequence[float]
    resident_nbytes: int  # at most


def row(model: str, pairs: int) -> Row:
    """Measure one model; run it in a process of its own."""
    torch.set_num_threads(1)
    plain, batch = medium.build(model)
    seconds(plain, batch)  # gradients are there from now on
    step = hollow.run(plain, (), batch, None, CPU, time_ops=False)
    peak = max(accumulate(change.nbytes for change in step.allocations.changes))
    del step
    with AllocatorTimeline() as timeline:
        seconds(plain, batch)
    node = neediest(profile(plain, **batch))
    ratios, steps = [], []
    for _ in range(pairs):
        steps.append(seconds(plain, batch))
        began = time.thread_time()
        profile(plain, **batch)
        ratios.append((time.thread_time() - began) / steps[-1])
    return Row(model, timeline.peak_bytes, peak, node, statistics.median(steps), ratios)


def neediest(found: Profile) -> int:
    """Bytes of the node of backward that needs most: what it unpacks, its kernel's own, and the gradients and
    temporaries that are live then.
    """
    storage = [found.values.storage[value] for value in found.saved.value]
    return max(
        own + sum(found.storages.nbytes[i] for i in {storage[row] for row in unpacked})
        for own, unpacked in zip(found.backward.peak_nbytes, found.backward.unpacks.rows(), strict=True)
    )


def fake() -> Fake:
    """Profile Llama 3 8B twice; run it in a process of its own."""
    torch.set_num_threads(2)
    taken = []
    for _ in range(2):
        began = time.process_time()
        model, batch = llama(32)
        found = profile(model, **batch, on=DATASHEETS["h100"])
        taken.append(time.process_time() - began)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Fake(len(found.ops), taken, resident)


def render(rows: Sequence[Row], of_fake: Fake) -> str:
    """The page."""
    lean = sum(row.memory <= 1 / 3 for row in rows)
    quick = sum(row.time <= 2.5 for row in rows)
    first, second = of_fake.seconds
    lines = [
        "# What a profile costs",
        "",
        "Made by `make bench-profile`, not by hand; docs/profiling.md says how profiles are taken.",
        "",
        f"torch {torch.__version__}, one thread. A hollow step held at most a third of what a plain one does "
        f"in {lean} of {len(rows)} models, and a profile took at most 2.5 plain steps in {quick}. "
        f"Pairs of steps and profiles for each model: {min(len(row.ratios) for row in rows)}.",
        "",
        "| model | plain step, ms | plain holds | hollow holds | part | one node | profile / plain step |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        lines.append(
            f"| {r.model} | {r.plain_s * 1e3:.0f} | {format_bytes(r.plain_nbytes)} "
            f"| {format_bytes(r.hollow_nbytes)} | {r.memory:.2f} | {r.node_nbytes / r.plain_nbytes:.2f} "
            f"| {r.time:.2f} |"
        )
    lines += [
        "",
        "What a hollow step holds is what one node of backward needs: its inputs, the gradients around it "
        "and its kernel's own (*one node*, as a part of the plain step too). No step that runs the "
        "kernel holds less. Where a few ops make up the model, that is much of a plain step too: an "
        "LSTM's op keeps a workspace for all its time steps, and a U-Net of two levels has half of its bytes "
        "at the first and the last one.",
        "",
        f"A fake profile of Llama 3 8B, 32 layers, 1 x 8192 tokens, for an H100 ({of_fake.ops} ops): "
        f"{first:.1f} CPU seconds, a second one in the same process {second:.1f}, imports not "
        f"counted. At most {format_bytes(of_fake.resident_nbytes)} were resident, imports included.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=medium.MODELS, help="may be given again")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--out", type=Path, default=TABLE, help="the page, written if all models were run")
    given = parser.parse_args()
    of_fake = alone(fake)
    rows = []
    for model in given.only or medium.MODELS:
        rows.append(alone(row, model, given.pairs))
        print(f"{model}: {rows[-1].memory:.2f} of the memory, {rows[-1].time:.2f} steps", file=sys.stderr)
    if given.only:
        print(render(rows, of_fake))
    else:
        write_whole(given.out, render(rows, of_fake))


if __name__ == "__main__":
    main()
