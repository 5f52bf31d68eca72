"""A first training step without a profile: its peak, its time and its numbers next to plain training.

    python -m benchmarks.observed_step [--only PATTERN] [--out FILE]

Each model trains one step plainly, one as an *observed* step (everything recomputed but what cuts hold,
tape/runtime/cuts.py), and one with torch's checkpoint around every block, where it has lists of blocks.
Losses, gradients, buffers and the generator's state are compared bit for bit. Peaks are the allocator's, of
the whole step with parameters and gradients, without an optimizer.

Exit with 1 if a number differs, if a peak is above 1.02 times that of plain training, or if fewer than nine
of ten models with blocks stay within 1.1 times the peak of their checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.tape.runtime.cuts import Cuts
from autoac.tape.runtime.policy_context import save_recompute_policy
from autoac.tape.torch_facts.module_paths import watch_modules
from benchmarks.models import medium, tiny, unfamiliar
from benchmarks.models.batches import ModelAndBatch
from benchmarks.results import bench_parser, chosen, markdown_table, shown, write_result
from benchmarks.steps import loss_of
from benchmarks.torch_checkpoint import wrap_blocks

MOST_OF_CHECKPOINT, MOST_OF_PLAIN = 1.1, 1.02
WITHIN_CHECKPOINT = 0.9  # of the models with blocks
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Step:
    """One training step, measured."""

    peak_bytes: int
    cpu_s: float  # of forward and backward
    numbers: dict[str, Tensor]  # loss, gradients, buffers, state of the generator


@dataclass(frozen=True, slots=True)
class Row:
    """The steps of one model; `blocks` is None if it has no list of blocks, or torch's checkpoint failed."""

    name: str
    plain: Step
    observed: Step
    blocks: Step | None

    @property
    def differs(self) -> list[str]:
        mine, theirs = self.observed.numbers, self.plain.numbers
        return [name for name in theirs if name not in mine or not same(mine[name], theirs[name])]


def same(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are equal bit for bit."""
    if a.layout is not torch.strided:
        a, b = a.coalesce(), b.coalesce()
        return torch.equal(a.indices(), b.indices()) and torch.equal(a.values(), b.values())
    return a.dtype == b.dtype and torch.equal(a, b)


def block_lists(model: nn.Module) -> list[nn.ModuleList]:
    """Return the lists of several modules that are inside of no other such list."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not inside:
            found[name] = module
    return list(found.values())


def train(make: Callable[[], ModelAndBatch], way: str) -> Step:
    """Return one step of a new model, trained in one of three ways."""
    with AllocatorTimeline() as timeline:
        torch.manual_seed(0)
        model, batch = make()
        model.train()
        if way == "checkpoint":
            for blocks in block_lists(model):
                wrap_blocks(blocks, "checkpoint")
        timeline.mark("step")
        torch.manual_seed(1)
        began = os.times().user
        if way == "observed":
            cuts = Cuts(gradients=sum(p.nbytes for p in model.parameters() if p.requires_grad))
            watch_modules(model, enter=lambda _: None, leave=cuts.note_exit)
            with save_recompute_policy("recompute_all", cuts=cuts):
                out = model(**batch)
        else:
            out = model(**batch)
        loss = loss_of(out)
        loss.backward()
        cpu_s = os.times().user - began
    numbers = {"loss": loss.detach(), "generator": torch.get_rng_state()}
    numbers |= {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    numbers |= {
        f"gradient of {n}": t.grad for n, t in batch.items() if isinstance(t, Tensor) and t.grad is not None
    }
    numbers |= {f"buffer {n}": b for n, b in model.named_buffers()}
    return Step(timeline.peak_since("step"), cpu_s, numbers)


def tiny_case(case: tiny.ZooModel) -> ModelAndBatch:
    """Return a model of `models/tiny.py`, and its batch."""
    return case.make(), case.batch()


CASES: dict[str, Callable[[], ModelAndBatch]] = {
    **{f"tiny {case.name}": partial(tiny_case, case) for case in (*tiny.ZOO, *tiny.IRREGULAR)},
    **medium.MODELS,
    **unfamiliar.MODELS,
}
"""Functions that make a model and its batch, by name."""


def measure(name: str) -> Row:
    """Return the row of one model."""
    make = CASES[name]
    blocks = None
    if block_lists(make()[0]):
        try:
            blocks = train(make, "checkpoint")
        except (RuntimeError, ValueError, TypeError) as error:
            print(f"{name}: torch's checkpoint: {error}")
    return Row(name, train(make, "plain"), train(make, "observed"), blocks)


HEAD = (
    *("model", "plain, MiB", "observed, MiB", "/ plain", "/ checkpoint of blocks", "CPU time / plain"),
    "differs",
)


def cells(row: Row) -> list[str]:
    observed, plain = row.observed.peak_bytes, row.plain.peak_bytes
    return [
        row.name,
        *(f"{peak / MIB:.2f}" for peak in (plain, observed)),
        f"{observed / plain:.3f}",
        f"{observed / row.blocks.peak_bytes:.3f}" if row.blocks else "",
        f"{row.observed.cpu_s / max(row.plain.cpu_s, 0.01):.2f}",
        ", ".join(row.differs[:3]),
    ]


def main() -> int:
    """Measure, and print the table."""
    options = bench_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    rows = shown(map(measure, chosen(CASES, options.only)), cells)
    pairs = [(row.observed.peak_bytes, row.blocks.peak_bytes) for row in rows if row.blocks is not None]
    within = sum(observed <= MOST_OF_CHECKPOINT * blocks for observed, blocks in pairs)
    wrong = sum(
        bool(row.differs) or row.observed.peak_bytes > MOST_OF_PLAIN * row.plain.peak_bytes for row in rows
    )
    summary = (
        f"{len(rows)} models, {wrong} with other numbers or above plain training; {within} of "
        f"{len(pairs)} within {MOST_OF_CHECKPOINT} times checkpoint around every block."
    )
    write_result(f"{summary}\n\n{markdown_table(HEAD, map(cells, rows))}", options.out)
    return int(bool(wrong) or within < WITHIN_CHECKPOINT * len(pairs))


if __name__ == "__main__":
    raise SystemExit(main())
