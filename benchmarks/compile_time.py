"""Measure what planning adds to the compile time of a model, in a first process and with warm caches.

Times are seconds of CPU up to the end of the second step, child processes included. Processes with a plan
and without take turns, and the median counts. Each first process has new caches.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor, nn

import ac_client
from autoac.planner import find_minimum_peak, plan
from autoac.profiler import profile
from benchmarks.models.modules import Transformer
from benchmarks.results import markdown_table

HEAD = ("process", "CPU s without a plan", "with a plan", "added", "graphs compiled", "from the cache")
TURNS = ("first", "later, with warm caches")


def spent_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def model_and_batch(layers: int) -> tuple[nn.Module, Tensor]:
    """Return the model whose compilation is measured; one thread, for this process and its results."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Transformer(layers=layers, width=64), torch.randn(4, 64, 64)


def budget_at(share: float, layers: int, backend: str) -> int:
    """Return a budget in bytes, at `share` of the way from the smallest peak to the one that saves all."""
    model, batch = model_and_batch(layers)
    compiled: Any = torch.compile(model, backend=backend)
    found = profile(compiled, batch)
    lowest, highest = find_minimum_peak(found, time_limit_s=10).found, plan(found, budget_gb=1024).peak
    return int(lowest + share * (highest - lowest))


def train(layers: int, backend: str, budget: int | None) -> dict[str, Any]:
    """Run two steps, planned if there is a budget, and return the row of this process."""
    from torch._dynamo.utils import counters

    model, batch = model_and_batch(layers)
    began = spent_s()
    call = torch.compile(model, backend=backend)
    if budget is not None:
        ac_client.apply(model, budget / 2**30)
    for _ in range(2):
        model.zero_grad()
        out = call(batch)
        out["logits"].square().mean().backward()
    cpu_s = spent_s() - began
    if budget is not None:
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
    parser.add_argument(
        "--share", type=float, default=0.5, help="of the way from the smallest to the largest peak"
    )
    parser.add_argument("--first", type=int, default=3, help="first processes")
    parser.add_argument("--later", type=int, default=5, help="processes with warm caches")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--budget", type=int, help="in bytes, of a child")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(train(options.layers, options.backend, options.budget)))
        return
    shared = ["--layers", str(options.layers), "--backend", options.backend]
    budget = budget_at(options.share, options.layers, options.backend)
    extra = {"without": [], "with": ["--budget", str(budget)]}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in extra}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.first + options.later):
            caches = min(turn, options.first - 1)  # those of the last first process stay
            for name, more in extra.items():
                found[name].append(in_process(f"{folder}/{name}{caches}", *shared, *more))
                print(name, found[name][-1], flush=True)
    rows = []
    for label, taken in zip(TURNS, (slice(options.first), slice(options.first, None)), strict=True):
        without, planned = (found[name][taken] for name in extra)
        base, cpu_s = (statistics.median(row["cpu_s"] for row in part) for part in (without, planned))
        share = f"{cpu_s - base:+.1f} s ({cpu_s / base - 1:+.0%})"
        rows.append(
            (label, f"{base:.1f}", f"{cpu_s:.1f}", share, str(planned[0]["missed"]), str(planned[0]["hit"]))
        )
    print(f"\n{markdown_table(HEAD, rows)}")


if __name__ == "__main__":
    main()
