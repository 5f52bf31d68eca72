"""Plan a model whose blocks are compiled one by one: variants, time of the plan, and peaks.

All blocks run the same graph, so each block that saves other tensors takes one more compilation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

import ac_client
from autoac.planner import find_minimum_peak, plan
from autoac.profiler import profile
from benchmarks.models.modules import Transformer
from benchmarks.results import markdown_table, shown
from benchmarks.steps import Trainee

SHARES = (0.75, 0.5, 0.25, 0.1, 0.0)
HEAD = ("share", "budget", "predicted", "measured", "ops again", "over the bound", "variants", "plan, CPU s")


@dataclass
class CountingBackend:
    """The backend aot_eager, which counts how often it compiles a forward."""

    compilations: int = 0

    def forward(self, module: Any, inputs: Any) -> Any:
        self.compilations += 1
        return boxed_nop(module, inputs)

    def trainee(self, layers: int) -> Trainee:
        """Return a model whose blocks this backend compiles one by one."""
        backend = aot_autograd(fw_compiler=self.forward, bw_compiler=boxed_nop)
        torch.manual_seed(0)
        model, batch = Transformer(layers=layers, width=64), {"x": torch.randn(4, 64, 64)}
        for block in model.blocks:
            block.compile(backend=backend)
        return Trainee(model, batch, loss=lambda out: out["logits"].square().mean())


def rows(layers: int) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each budget."""
    unplanned = CountingBackend().trainee(layers)
    found = profile(unplanned.model, **unplanned.batch, loss=unplanned.loss)
    lowest, highest = find_minimum_peak(found).found, plan(found, budget_gb=1024).peak
    for share in SHARES:
        budget = int(lowest + share * (highest - lowest))
        began = time.process_time()
        made = plan(found, budget_bytes=budget)
        plan_s = time.process_time() - began
        torch.compiler.reset()
        counting = CountingBackend()
        trainee = counting.trainee(layers)
        ac_client.apply(trainee.model, policy=made.policy())
        trainee.step()
        sizes = (budget, made.peak, trainee.peak() + made.graph.static_bytes)
        yield (
            f"{share:.0%}",
            *(f"{size:,}" for size in sizes),
            str(len(made.recompute_set)),
            f"{made.gap:.1%}",
            str(counting.compilations),
            f"{plan_s:.1f}",
        )


def main() -> None:
    """Run the command in the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    layers = parser.parse_args().layers
    torch.set_num_threads(1)
    print(markdown_table(HEAD, shown(rows(layers), list)))


if __name__ == "__main__":
    main()
