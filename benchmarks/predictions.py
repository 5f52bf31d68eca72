"""Compare predicted peaks with those that were published for clusters, and write docs/predictions.md.

    python -m benchmarks.predictions [--only PATTERN] [--out docs/predictions.md]

Each row is a training run whose memory its authors published: of torchtitan, or on one GPU
(single_gpu_runs.py). One rank of it is profiled in a fake step, with torch's own checkpoints in the model,
and nothing is fitted to the figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from autoac.planner import bounds, build, plan
from autoac.profiler import DATASHEETS, fake_ranks, observe
from benchmarks.models.sharded_llama import (
    LLAMA_2_7B,
    LLAMA_3_8B,
    LLAMA_3_70B,
    Llama,
    Norm,
    Training,
    Widths,
    sharded,
)
from benchmarks.results import bench_parser, chosen, markdown_table, shown, write_result
from benchmarks.single_gpu_runs import RUNS as SINGLE_RUNS
from benchmarks.single_gpu_runs import SingleRun, predicted

GIB = 2**30
TITAN = "https://github.com/pytorch/torchtitan"
TABLES = f"{TITAN}/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
PULL = f"{TITAN}/pull/{{}}"
H200 = f"{TITAN}/blob/main/benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
H100_GIB = 95.0396  # of the GPU in pull request 165, whose figures are percentages of it
EAGER, COMPILED, FLOAT8 = "eager", "compiled", "compiled, float8"


@dataclass(frozen=True, slots=True)
class Run:
    """A published run. Peaks in GiB: bytes in use (torch's "active"), and reserved by the allocator."""

    model: str
    widths: Widths
    ranks: int
    batch: int
    source: str
    reserved: float
    active: float | None = None
    ran: str = EAGER  # or what the prediction takes for eager
    length: int = 8192
    tensor: int = 1  # ranks that share each layer
    checkpoint: str = "ops"
    reshard: str = "but the last"
    norm: Callable[[int], nn.Module] = Norm
    chunks: int = 1  # of the loss
    wide: bool = True  # the loss is in float32
    holds_logits: bool = False  # during backward
    ends: bool = False  # embeddings and head are units of fully_shard of their own

    @property
    def setup(self) -> str:
        layout = (
            f"{self.ranks} GPUs" if self.tensor == 1 else f"{self.ranks // self.tensor} x TP {self.tensor}"
        )
        parts = [layout, f"{self.batch} x {self.length}", f"AC {self.checkpoint}"]
        parts += [f"reshard {self.reshard}"] if self.reshard != "but the last" else []
        parts += [f"loss in {self.chunks} chunks"] if self.chunks > 1 else []
        parts += ["nn.RMSNorm"] if self.norm is nn.RMSNorm else []
        return ", ".join([*parts, self.ran])


def _8b(
    source: str,
    reserved: float,
    active: float | None = None,
    *,
    ranks: int = 8,
    batch: int = 1,
    **more: object,
) -> Run:
    return Run("Llama 3 8B", LLAMA_3_8B, ranks, batch, source, reserved, active, **more)  # type: ignore[arg-type]


def _70b(reserved: float, ran: str) -> Run:
    return Run("Llama 3 70B", LLAMA_3_70B, 256, 16, TABLES, reserved, ran=ran, tensor=8, checkpoint="full")


def _7b(reserved: float, active: float | None = None, *, batch: int = 8, **more: object) -> Run:
    return Run(
        "Llama 2 7B",
        LLAMA_2_7B,
        8,
        batch,
        PULL.format(165),
        reserved,
        active,
        length=2048,
        wide=False,
        holds_logits=True,
        **more,  # type: ignore[arg-type]
    )


def _percent(reserved: float, active: float) -> tuple[float, float]:
    """Return GiB for percent of the GPU of pull request 165."""
    return reserved / 100 * H100_GIB, active / 100 * H100_GIB


RUNS = (
    _8b(PULL.format(699), 49.58594, 41.17145),
    _7b(*_percent(32.64, 23.92), checkpoint="full"),
    _7b(*_percent(62.51, 52.13)),
    _7b(*_percent(60.97, 50.12), batch=16, checkpoint="full", tensor=2),
    _7b(*_percent(90.14, 76.49), batch=16, tensor=2),
    _8b(PULL.format(822), 49.59),
    _8b(PULL.format(822), 49.41, reshard="always"),
    _8b(PULL.format(822), 62.18, reshard="never"),
    _8b(PULL.format(985), 49.66, norm=nn.RMSNorm),
    _8b(PULL.format(996), 42.26, chunks=8, norm=nn.RMSNorm),
    _8b(PULL.format(1625), 47.38, norm=nn.RMSNorm, ends=True),
    _8b(TABLES, 82.4, batch=2),
    _8b(TABLES, 67.0, batch=2, ranks=128),
    _7b(28.72, checkpoint="full", ran=COMPILED),
    _7b(53.83, ran=COMPILED),
    _7b(88.23, batch=16, ran=COMPILED),
    _7b(90.28, checkpoint="none", ran=COMPILED),
    _8b(PULL.format(808), 47.65, ran=COMPILED),
    _8b(TABLES, 77.0, batch=2, ran=COMPILED),
    _8b(TABLES, 62.0, batch=2, ranks=128, ran=COMPILED),
    _8b(PULL.format(808), 47.77, ran=f"{FLOAT8} by rows"),
    _8b(PULL.format(808), 47.32, ran=FLOAT8),
    _8b(TABLES, 76.8, batch=2, ran=FLOAT8),
    _8b(TABLES, 61.8, batch=2, ranks=128, ran=FLOAT8),
    _8b(TABLES, 83.9, length=32768, checkpoint="full", ran=FLOAT8),
    _70b(71.9, FLOAT8),
    _70b(67.6, f"{FLOAT8}, async TP"),
    _8b(H200, 47.96, batch=2, ranks=32, norm=nn.RMSNorm, ran=f"{FLOAT8}, the loss too"),
    _8b(H200, 46.97, batch=2, ranks=64, norm=nn.RMSNorm, ran=f"{FLOAT8}, the loss too"),
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted peaks of a run, in GiB."""

    run: Run
    active: float
    reserved: float

    @property
    def active_error(self) -> float | None:
        return None if self.run.active is None else self.active / self.run.active - 1

    @property
    def reserved_error(self) -> float:
        return self.reserved / self.run.reserved - 1


def predict(run: Run) -> Prediction:
    """Predict a run, once for all that differ in what the prediction leaves out."""
    eager = replace(run, source="", reserved=0.0, active=None, ran=EAGER)
    return Prediction(run, *predicted_peaks(eager))


@cache
def predicted_peaks(run: Run) -> tuple[float, float]:
    """Profile one rank of a run, and return the bytes in use and those reserved, in GiB."""
    with fake_ranks(run.ranks), loss_parallel():
        model = sharded(
            Llama(run.widths, run.length, run.norm),
            run.ranks,
            run.tensor,
            checkpoint=run.checkpoint,
            reshard=run.reshard,
            ends=run.ends,
        )
        ids = torch.ones(run.batch, run.length, dtype=torch.long)
        profile = observe(
            Training(model, run.chunks, wide=run.wide, holds_logits=run.holds_logits),
            (ids, ids),
            {},
            loss=lambda out: out[0] if run.holds_logits else out,
            optimizer=torch.optim.AdamW(model.parameters(), foreach=True),
            on=DATASHEETS["h100"],
            take_over_checkpoints=False,
        )
    found = plan(profile, budget_bytes=bounds(build(profile)).ceiling)  # with nothing recomputed but by torch
    fragments = found.fragment_bytes()
    assert fragments is not None
    return found.peak / GIB, (found.peak + fragments) / GIB


def summary(words: str, errors: Sequence[tuple[float, Run | SingleRun]]) -> str:
    """Return the median and the worst of some errors."""
    error, run = max(errors, key=lambda item: abs(item[0]))
    median = statistics.median(abs(error) for error, _ in errors)
    return (
        f"- **{words}**: {len(errors)} figures, median error {median:.1%}.\n"
        f"  The worst is {error:+.1%} ({run.model}, {run.setup})."
    )


def page(predictions: list[Prediction], single: list[tuple[SingleRun, float]]) -> str:
    """Return docs/predictions.md."""
    eager = [p for p in predictions if p.run.ran == EAGER]
    kinds = {
        "bytes in use": [(p.active_error, p.run) for p in predictions if p.active_error is not None],
        "reserved, eager runs": [(p.reserved_error, p.run) for p in eager],
        "reserved, compiled runs": [(p.reserved_error, p.run) for p in predictions if p.run.ran != EAGER],
    }
    of_single = [(peak / run.peak - 1, run) for run, peak in single]
    every: list[tuple[float, Run | SingleRun]] = [*of_single, *((p.reserved_error, p.run) for p in eager)]
    summaries = [summary(f"torchtitan, {words}", errors) for words, errors in kinds.items() if errors]
    summaries += [summary("One GPU", of_single)] if of_single else []
    summaries += [summary("All eager runs", every)] if every else []
    runs: list[tuple[str, Run | SingleRun, float, float]] = [
        *(("torchtitan", p.run, p.run.reserved, p.reserved) for p in eager),
        *((run.project, run, run.peak, peak) for run, peak in single),
    ]
    rows = [
        [
            f"[{project}]({run.source}): {run.model}, {run.setup.removesuffix(f', {EAGER}')}",
            *(f"{published:.2f}", f"{peak:.2f}", f"{peak / published - 1:+.1%}"),
        ]
        for project, run, published, peak in runs
    ]
    unknown = dict.fromkeys(f"- {run.project}, bytes {run.figure}: {run.unknown}." for run, _ in single)
    return TEXT.format(
        unknown="\n".join(unknown),
        table=markdown_table(["run", "published", "predicted", "error"], rows),
        summaries="\n".join(summaries),
    )


TEXT = """# Predictions

After reading this page you know how far predicted peaks were from those measured on clusters and GPUs that
we do not have. `make bench-predictions` makes the page without a GPU.

Each row is a run whose memory its authors published, in GiB. It is profiled on fake tensors, with torch's own
checkpoint in the model; no number is fitted to the figures.

{summaries}

Of [torchtitan](https://github.com/pytorch/torchtitan), [one rank](profiling.md#one-rank-of-many) is
profiled: a Llama of the same widths (`benchmarks/models/sharded_llama.py`), AdamW, parameters in float32 and
products in bf16, `fully_shard`, tensor and sequence parallelism.

*In use* are the bytes that the allocator has handed out (torch's "active"). *Reserved* is what it took
from the GPU; the prediction replays its rules ([fragmentation](budget.md#fragmentation)) for three
steps. "AC ops" is torchtitan's selective checkpoint, which saves attention and every second product;
"4 x TP 2" shards over 4 times 2 ranks. Compiled runs are predicted as eager, and float8 as bf16; the table
leaves those out.

{table}

Of torchtitan, reserved bytes are in the table. What is not known of the others:

{unknown}

## Where predictions differ

- The replay gives gradients of sharded parameters a stream of their own. All-gathers have one too,
  whose memory nothing else gets; the replay does not know that, so it reserves less.
- Runs of March 2024 (#165) used the `fully_shard` and the DTensor of that time. In the two of 4 x TP 2 a
  rank has as many tokens as with 8 x 2048, but up to twice its memory.
- Comparisons taught facts of the runs: litgpt's norms compute in float32 (-4.2 became -1.0%), its trainer
  makes logits float32 (-9.9 became 0.0%), and `zero_grad` of transformers in 2022 kept gradients (-18
  became -9%).
- Workspaces of cuDNN are not predicted.
"""


def main() -> None:
    """Predict, and write the page."""
    options = bench_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    runs = {f"{run.model}, {run.setup}, {run.source}": run for run in RUNS}
    others = {f"{run.project}, {run.model}, {run.setup}": run for run in SINGLE_RUNS}
    names = list(chosen(runs | others, options.only))
    asked = (predict(runs[name]) for name in names if name in runs)
    predictions = shown(asked, lambda p: (p.run.model, p.run.setup, f"{p.reserved_error:+.1%}"))
    alone = ((others[name], predicted(others[name])) for name in names if name in others)
    single = shown(alone, lambda p: (p[0].model, p[0].setup, f"{p[1]:.2f} GiB"))
    write_result(page(predictions, single).removesuffix("\n"), options.out)


if __name__ == "__main__":
    main()
