"""Measure what planning adds to the compile time of a model, in a first process and in one with warm caches.

Times are seconds of CPU up to the end of the second step, child processes included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor, nn

import ac_client
from benchmarks.models.modules import Transformer
from benchmarks.results import markdown_table

HEAD = ("process", "CPU s without a plan", "with a plan", "added", "graphs compiled", "from the cache")
TURNS = ("first", "second, with warm caches")


def spent_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def train(layers: int, backend: str, budget_gb: float | None) -> dict[str, Any]:
    """Run two steps, planned if there is a budget, and return the row of this process."""
    from torch._dynamo.utils import counters

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = Transformer(layers=layers, width=64)
    batch: Tensor = torch.randn(4, 64, 64)
    began = spent_s()
    call = torch.compile(model, backend=backend)
    if budget_gb is not None:
        ac_client.apply(model, budget_gb)
    for _ in range(2):
        model.zero_grad()
        out = call(batch)
        out["logits"].square().mean().backward()
    cpu_s = spent_s() - began
    if budget_gb is not None:
        assert ac_client.applied(model).report().recomputed > 0
    found = counters["inductor"]
    return {"cpu_s": cpu_s, "missed": found["fxgraph_cache_miss"], "hit": found["fxgraph_cache_hit"]}


def in_process(caches: str, *options: str) -> dict[str, Any]:
    """Return the row of a new process whose caches are in a folder."""
    command = [sys.executable, "-m", "benchmarks.compile_time", "--child", *options]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--budget-gb", type=float)
    parser.add_argument("--child", action="store_true")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(train(options.layers, options.backend, options.budget_gb)))
        return
    shared = ["--layers", str(options.layers), "--backend", options.backend]
    planned = ["--budget-gb", str(options.budget_gb or 0.012)]
    found = {}
    for name, extra in (("unplanned", []), ("planned", planned)):
        with tempfile.TemporaryDirectory() as caches:
            for turn in TURNS:
                found[name, turn] = in_process(caches, *shared, *extra)
                print(name, turn, found[name, turn], flush=True)
    rows = []
    for turn in TURNS:
        without, row = found["unplanned", turn], found["planned", turn]
        added = row["cpu_s"] - without["cpu_s"]
        share = f"{added:+.1f} s ({added / without['cpu_s']:+.0%})"
        times = (f"{without['cpu_s']:.1f}", f"{row['cpu_s']:.1f}")
        rows.append((turn, *times, share, str(row["missed"]), str(row["hit"])))
    print(f"\n{markdown_table(HEAD, rows)}")


if __name__ == "__main__":
    main()
