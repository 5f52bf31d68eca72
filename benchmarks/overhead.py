"""Measure what recording costs: `python -m benchmarks.overhead [--rounds N] [--only PART] [--out FOLDER]`.

Tiny ops (worst case: the cost is all overhead), views, a GPT-2 block, and a training step of a whole GPT-2
under a plan that saves everything. All ways of running are measured in turn within each round, in one
process, by the CPU time of the thread; the least of the rounds is quoted for tiny ops, the paired median for
steps. The last table sets the host's time for the ops of two models against the time that an H100 takes for
them by its datasheet.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ac_client
from ac_client.demo.setting import Setting, build_model, make_batch
from autoac.planner import plan
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.build import build
from autoac.profiler import DATASHEETS, profile
from autoac.tape.runtime.policy_context import save_recompute_policy
from benchmarks.models import large
from benchmarks.results import markdown_table, write_result
from benchmarks.torch_checkpoint import SAVED_BY_SELECTIVE, overload

OPS = 400
Run = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


class Empty(TorchDispatchMode):
    """A mode that does nothing: the least that any runtime in Python costs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under(context: Callable[[], Any]) -> Run:
    """Return a way to run inside a context."""

    def run(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with context():
            return function(x)

    return run


def selective(policy: CheckpointPolicy) -> Run:
    """Return a way to run under torch's selective checkpoint."""

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy

    contexts = partial(create_selective_checkpoint_contexts, decide)
    return lambda function, x: checkpoint(function, x, use_reentrant=False, context_fn=contexts)


RECORDED = "ours, recompute all"
SELECTIVE = "torch selective, recompute"
WAYS: dict[str, Run] = {
    "plain": lambda function, x: function(x),
    "empty mode": under(Empty),
    "torch checkpoint": lambda function, x: checkpoint(function, x, use_reentrant=False),
    SELECTIVE: selective(CheckpointPolicy.PREFER_RECOMPUTE),
    "torch selective, save": selective(CheckpointPolicy.MUST_SAVE),
    RECORDED: under(lambda: save_recompute_policy("recompute_all")),
    "ours, save all": under(lambda: save_recompute_policy("must_save_all")),
}


def chain(x: Tensor) -> Tensor:
    """Run ops of which autograd packs one tensor."""
    y = x
    for _ in range(OPS // 2):
        y = y.sin().tanh()
    return y


def products(x: Tensor) -> Tensor:
    """Run ops of which autograd packs both inputs."""
    y = x
    for _ in range(OPS):
        y = y * x
    return y


def views(x: Tensor) -> Tensor:
    """Run ops that only make views."""
    y = x
    for _ in range(OPS):
        y = y.view(-1)
    return y


def seconds(run: Run, function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[float, float]:
    """Return the seconds of forward and of backward."""
    x.grad = None
    begin = time.thread_time()
    y = run(function, x)
    middle = time.thread_time()
    y.sum().backward()
    return middle - begin, time.thread_time() - middle


def per_op(function: Callable[[Tensor], Tensor], rounds: int) -> dict[str, dict[str, float]]:
    """Return the microseconds of an op, forward and backward, for each way of running."""
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, run in WAYS.items():
            found[way].append(seconds(run, function, torch.randn(8, requires_grad=True)))
    return {
        way: {
            "forward_us": min(f for f, _ in times) / OPS * 1e6,
            "backward_us": min(b for _, b in times) / OPS * 1e6,
        }
        for way, times in found.items()
    }


def block_steps(rounds: int) -> dict[str, float]:
    """Return the time of a GPT-2 block's forward and backward, divided by the plain one's."""
    x = torch.randn(1, 256, 768, requires_grad=True)
    block = build_model(Setting(layers=1, width=768, heads=12, vocabulary=8192)).get_submodule(
        "transformer.h.0"
    )
    planned = copy.deepcopy(block)
    found = profile(block, x)
    graph = build(found)
    budget = int(peak_bytes(graph, graph.everything) * 0.97)
    ac_client.apply(planned, policy=plan(found, budget_bytes=budget).policy())
    ways = WAYS | {"torch selective, matmuls": _selective_matmuls()}
    del ways["torch selective, save"], ways["torch selective, recompute"]  # the first raises on dropout
    runs = {way: partial(_block_step, run, block, x) for way, run in ways.items()}
    return paired({**runs, "ours, a plan": partial(_block_step, WAYS["plain"], planned, x)}, rounds)


def _selective_matmuls() -> Run:
    saved = [overload(torch.ops, name) for name in SAVED_BY_SELECTIVE]
    contexts = partial(create_selective_checkpoint_contexts, saved)
    return lambda function, x: checkpoint(function, x, use_reentrant=False, context_fn=contexts)


def _block_step(run: Run, block: nn.Module, x: Tensor) -> None:
    def forward(x: Tensor) -> Tensor:
        out: Tensor | tuple[Tensor, ...] = block(x)
        return out if isinstance(out, Tensor) else out[0]

    x.grad = None
    block.zero_grad()
    run(forward, x).sum().backward()


def gpt2_steps(setting: Setting, rounds: int) -> dict[str, float]:
    """Return the time of a GPT-2 training step under several plans, divided by the plain step's."""
    ids = make_batch(setting)

    def made() -> nn.Module:
        model = build_model(setting)
        for parameter in model.parameters():  # kept between steps, as in the demo
            parameter.grad = torch.zeros_like(parameter)
        return model

    def step(model: nn.Module) -> None:
        model.zero_grad(set_to_none=False)
        torch.manual_seed(0)
        model(ids, labels=ids).loss.backward()

    found = profile(made(), ids, labels=ids)
    graph = build(found)
    most = peak_bytes(graph, graph.everything)
    models = {"plain": made()}
    for name, budget in (("ours, save-all plan", most), ("ours, 3 % less memory", int(most * 0.97))):
        policy = plan(found, budget_bytes=budget).policy()
        models[name] = ac_client.apply(made(), policy=policy)
    watched = made()
    runs: dict[str, Callable[[], None]] = {name: partial(step, model) for name, model in models.items()}

    def in_a_region() -> None:
        with save_recompute_policy("must_save_all"):
            watched.zero_grad(set_to_none=False)
            torch.manual_seed(0)
            loss = watched(ids, labels=ids).loss
        loss.backward()

    runs["ours, save-all region"] = in_a_region
    return paired(runs, rounds)


def paired(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return, for each run, the median over rounds of its time divided by the first run's."""
    first = next(iter(runs))
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for i in range(rounds):
        times = {}
        order = list(runs) if i % 2 else list(reversed(runs))
        for name in order:
            begin = time.thread_time()
            runs[name]()
            times[name] = time.thread_time() - begin
        for name in runs:
            ratios[name].append(times[name] / times[first])
    return {name: statistics.median(values) for name, values in ratios.items()}


def added_us(us: dict[str, dict[str, float]], way: str) -> float:
    """Return what a way of running adds to plain, forward and backward together."""
    return sum(us[way].values()) - sum(us["plain"].values())


def on_paper(us: dict[str, dict[str, float]]) -> list[list[str]]:
    """Return for two models the host's time of a step, all ops recomputed, and the time of an H100 for it.

    The host's times are those measured here for a tiny op; the H100's are of its datasheet, without launches.
    """
    rows = []
    for name, (model, batch) in {
        "Llama 3 8B, 1 x 1024": large.llama(32, length=1024),
        "GPT-2, 4 x 512": large.gpt2_small(batch=4, length=512),
    }.items():
        taken = profile(model, **batch, on=DATASHEETS["h100"])
        n, forward_us = len(taken.ops), sum(taken.ops.runtime_us)
        gpu_us = 2 * forward_us + sum(taken.backward.runtime_us)
        host = [f"{n * sum(us[way].values()) / 1e3:.0f}" for way in ON_PAPER]
        rows.append([name, str(n), f"{gpu_us / 1e3:.0f}", *host])
    return rows


ON_PAPER = ("plain", "torch checkpoint", SELECTIVE, RECORDED)
PARTS = ("tiny", "paper", "block", "gpt2")


def main() -> int:
    """Measure, print Markdown, and write JSON; return 1 if recording adds more than selective checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for the results")
    options = parser.parse_args()
    parts = options.only or PARTS
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for name, function in (("chain", chain), ("product", products), ("view", views)):
        result[name] = us = per_op(function, options.rounds)
        rows = [
            [way, f"{t['forward_us']:.1f}", f"{t['backward_us']:.1f}", f"{added_us(us, way):.1f}"]
            for way, t in us.items()
        ]
        print(f"\n{markdown_table([f'a tiny {name}', 'forward us', 'backward us', 'added to plain'], rows)}")
    holds = all(
        added_us(result[name], RECORDED) <= added_us(result[name], SELECTIVE) for name in ("chain", "product")
    )
    if "paper" in parts:
        head = ["on paper", "ops", "H100 ms", *(f"host ms, {way}" for way in ON_PAPER)]
        print(f"\n{markdown_table(head, on_paper(result['chain']))}")
    if "block" in parts:
        print_ratios("a GPT-2 block, width 768, 256 tokens", block_steps(options.rounds), result)
    if "gpt2" in parts:
        setting = Setting(layers=4, width=768, heads=12, vocabulary=8192)
        print_ratios(setting.describe(), gpt2_steps(setting, max(7, options.rounds // 2)), result)
    write_result(json.dumps(result, indent=1), options.out / "overhead.json")
    return int(not holds)


def print_ratios(title: str, ratios: dict[str, float], result: dict[str, Any]) -> None:
    """Print the ratios to plain as a table, and add them to the result."""
    result[title] = ratios
    rows = [[way, f"{ratio:.3f}"] for way, ratio in ratios.items()]
    print(f"\n{markdown_table([title, 'time / plain'], rows)}")


if __name__ == "__main__":
    raise SystemExit(main())
