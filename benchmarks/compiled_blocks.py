"""Plan a model whose blocks are compiled one by one: variants, time of the plan, and peaks.

All blocks run the same graph, so each block that saves other tensors takes one more compilation.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

import ac_client
from autoac.planner import find_minimum_peak, plan
from autoac.profiler import profile
from autoac.tape.capture.allocations import AllocationRecord
from benchmarks.models.modules import Transformer
from benchmarks.results import markdown_table

SHARES = (0.75, 0.5, 0.25, 0.1, 0.0)
HEAD = ("share", "budget", "predicted", "measured", "ops again", "over the bound", "variants", "plan, CPU s")


@dataclass
class CountingBackend:
    """The backend aot_eager, which counts how often it compiles a forward."""

    compilations: int = 0

    def forward(self, module: Any, inputs: Any) -> Any:
        self.compilations += 1
        return boxed_nop(module, inputs)

    def compile_blocks(self, model: Transformer) -> Transformer:
        backend = aot_autograd(fw_compiler=self.forward, bw_compiler=boxed_nop)
        for block in model.blocks:
            block.compile(backend=backend)
        return model


def built(layers: int) -> Transformer:
    torch.manual_seed(0)
    return Transformer(layers=layers, width=64)


def train_step(model: Transformer, batch: Tensor) -> None:
    torch.manual_seed(1)
    out = model(batch)  # held until the end of backward, as the profile assumes
    out["logits"].square().mean().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    layers = parser.parse_args().layers
    torch.set_num_threads(1)
    batch = torch.randn(4, 64, 64)
    found = profile(
        CountingBackend().compile_blocks(built(layers)), batch, loss=lambda out: out["logits"].square().mean()
    )
    lowest, highest = find_minimum_peak(found).found, plan(found, budget_gb=1024).peak
    rows = []
    for share in SHARES:
        budget = int(lowest + share * (highest - lowest))
        began = time.process_time()
        made = plan(found, budget_bytes=budget)
        plan_s = time.process_time() - began
        torch.compiler.reset()
        counting = CountingBackend()
        model = counting.compile_blocks(built(layers))
        ac_client.apply(model, policy=made.policy())
        train_step(model, batch)
        model.zero_grad()
        with AllocationRecord(torch.device("cpu")) as record:
            train_step(model, batch)
        measured = max(accumulate(change.nbytes for change in record.changes)) + made.graph.static_bytes
        rows.append(
            (
                f"{share:.0%}",
                f"{budget:,}",
                f"{made.peak:,}",
                f"{measured:,}",
                str(len(made.recompute_set)),
                f"{made.gap:.1%}",
                str(counting.compilations),
                f"{plan_s:.1f}",
            )
        )
        print(rows[-1], flush=True)
    print(f"{len(found.ops)} ops\n\n{markdown_table(HEAD, rows)}")


if __name__ == "__main__":
    main()
