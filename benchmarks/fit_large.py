"""Time `fit` for published models on an H100, and compare its answer with a scan over all sizes.

    python -m benchmarks.fit_large [--only PATTERN] [--no-scan] [--out FILE]

The budget of a model is the peak of a step of four samples with nothing recomputed. In a scan every size has
a fake profile and a plan of its own, up to the first that has none. `fit` may find a largest size that is one
smaller, and a fastest size that is slower by 1 %.

Exit with 1 if `fit` takes more than `MOST_CPU_S`, or a size is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import transformers

import ac_client
from ac_client import Fit
from ac_client.fit import STEP_GAP, WORK_LIMIT
from autoac.planner import InfeasibleBudget, Profile, SolverOutOfTime, bounds, plan
from autoac.planner import build as graph_of
from autoac.planner.units import GIB
from autoac.profiler import DATASHEETS, observe
from benchmarks.models.batches import ModelAndBatch
from benchmarks.models.large import LLAMA_3_70B, llama, mamba_2_8b, tokens, unet_sd15, vit_h14, weightless
from benchmarks.results import bench_parser, chosen, markdown_table, shown, write_result

ON = "h100"
SIZE_OF_BUDGET = 4
MOST = 64
MOST_CPU_S = 60
SLOWER = 0.01


def qwen3_moe(batch: int) -> ModelAndBatch:
    """Build Qwen/Qwen3-30B-A3B, config.json, with grouped products."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=151936,
        num_key_value_heads=4,
        head_dim=128,
        num_hidden_layers=48,
        num_experts=128,
        moe_intermediate_size=768,
        max_position_embeddings=40960,
        use_cache=False,
        experts_implementation="grouped_mm",
    )
    with weightless():
        return transformers.Qwen3MoeForCausalLM(config).train(), tokens(batch, 4096)


MODELS: dict[str, Callable[[int], ModelAndBatch]] = {
    "Llama 3 8B": lambda batch: llama(32, batch=batch, length=4096),
    "Llama 3 70B": lambda batch: llama(80, batch=batch, length=4096, widths=LLAMA_3_70B),
    "Qwen3 30B-A3B": qwen3_moe,
    "ViT-H/14": lambda batch: vit_h14(8 * batch),
    "SD 1.5 U-Net": lambda batch: unet_sd15(2 * batch),
    "Mamba 2.8B": mamba_2_8b,
}


def profile_of(name: str, size: int) -> Profile:
    """Return the fake profile of one size."""
    model, batch = MODELS[name](size)
    return observe(model, (), batch, on=DATASHEETS[ON])


def scan(name: str, budget: int) -> dict[int, float]:
    """Return the speed of each size that has a plan."""
    speeds = dict[int, float]()
    for size in range(1, MOST + 1):
        try:
            found = plan(
                profile_of(name, size), budget_bytes=budget, step_gap=STEP_GAP, work_limit=WORK_LIMIT
            )
        except (InfeasibleBudget, SolverOutOfTime):
            break
        speeds[size] = size / (found.step_us + found.extra_us) * 1e6
    return speeds


@dataclass(frozen=True, slots=True)
class Row:
    """Hold what `fit` found for one model, and the speeds of a scan; empty without one."""

    name: str
    found: Fit
    cpu_s: float
    speeds: dict[int, float]

    @property
    def best(self) -> int:
        return max(self.speeds, key=self.speeds.__getitem__)

    @property
    def slower(self) -> float:
        return 1 - self.speeds[self.found.fastest] / self.speeds[self.best]

    @property
    def is_right(self) -> bool:
        if self.cpu_s > MOST_CPU_S:
            return False
        if not self.speeds:
            return True
        return self.found.largest >= max(self.speeds) - 1 and self.slower <= SLOWER


def measure(scans: bool, name: str) -> Row:
    """Return the row of one model."""
    budget = bounds(graph_of(profile_of(name, SIZE_OF_BUDGET))).ceiling
    began = time.process_time()
    found = ac_client.fit(MODELS[name], budget / GIB, on=ON, most=MOST, accumulates=False)
    cpu_s = time.process_time() - began
    return Row(name, found, cpu_s, scan(name, budget) if scans else {})


HEAD = ("model", "CPU seconds of fit", "largest: fit / scan", "fastest: fit / scan", "slower", "")


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table."""
    found, speeds = row.found, row.speeds
    return (
        row.name,
        f"{row.cpu_s:.0f}",
        f"{found.largest} / {max(speeds, default='-')}",
        f"{found.fastest} / {row.best if speeds else '-'}",
        f"{row.slower:.2%}" if speeds else "-",
        "" if row.is_right else "wrong",
    )


def main() -> int:
    """Measure all models and print the table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--no-scan", action="store_true", help="only time `fit`")
    options = parser.parse_args()
    rows = shown(map(partial(measure, not options.no_scan), chosen(MODELS, options.only)), cells)
    write_result(markdown_table(HEAD, map(cells, rows)), options.out)
    return int(not all(row.is_right for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
