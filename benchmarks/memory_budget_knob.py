"""Compare plans of compiled models with torch's `activation_memory_budget`, at the peaks that torch reaches.

Both sides get the same joint graph, run it node by node (`aot_eager`), and pay for recomputed ops by the same
clock: the op times of our profile. torch's peaks are measured by the allocator; our plan gets each of them as
its budget. Each side runs in a process of its own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition

import ac_client
from autoac.planner import Policy, Profile, build, find_minimum_peak, plan
from autoac.planner.errors import InfeasibleBudget, SolverOutOfTime
from autoac.profiler import profile
from autoac.profiler.capture.allocations import AllocationRecord
from autoac.profiler.joint_graph.joint_graph import JointGraph
from benchmarks.child_process import run_in_child
from benchmarks.models import medium
from benchmarks.results import add_out_argument, markdown_table, write_result

MIB = 2**20
BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.05, 0.0)
SOLVERS = ("dp", "ilp")
MODELS = ("GPT-2", "Llama", "BERT", "T5", "ViT", "ResNet", "U-Net", "DenseNet")
MATMULS = ("mm", "bmm", "baddbmm", "attention", "convolution")  # in names of ops
LEAST_TIME = 0.001  # of forward: times below count as this, so that ratios mean something
MOST_ERROR = 1e-3  # relative to the largest entry; above, a gradient is wrong


@dataclass(frozen=True, slots=True)
class Outcome:
    """A training step: bytes of its peak beyond the static ones, and what it recomputed."""

    peak: int
    recompute_us: float
    matmuls: int  # that ran again
    gradient_error: float  # relative to the largest entry of each gradient


@dataclass(frozen=True, slots=True)
class Row:
    """A peak that torch reaches, and our plan at that peak; None if none fits."""

    model: str
    setting: str
    torchs: Outcome
    ours: Outcome | None
    forward_us: float

    @property
    def ratio(self) -> float:
        """Return our recompute time over torch's; infinite if our plan does not fit."""
        if self.ours is None:
            return math.inf
        least = LEAST_TIME * self.forward_us
        return max(self.ours.recompute_us, least) / max(self.torchs.recompute_us, least)


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients by name, and their distance from those of another step."""

    by_name: dict[str, Any]  # arrays, since a tensor in a pipe belongs to its sender

    @classmethod
    def of(cls, model: nn.Module) -> Gradients:
        return cls({name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None})

    def error(self, reference: Gradients) -> float:
        """Return the largest error of an entry, relative to the largest entry of its gradient."""
        errors = [0.0]
        for name, want in reference.by_name.items():
            error, largest = abs(self.by_name[name] - want).max(), abs(want).max()
            errors.append(float(error / max(largest, 1e-30)))
        return max(errors)


def run_step(model: nn.Module, call: Callable[..., Any], batch: dict[str, Any]) -> None:
    model.zero_grad()
    torch.manual_seed(2)
    out = call(**batch)  # the loop holds it, as the plan expects
    loss_of(out).backward()


def loss_of(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.loss


def measured(model: nn.Module, call: Callable[..., Any], batch: dict[str, Any]) -> int:
    """Return the peak of a step beyond what was allocated before it, in bytes."""
    for _ in range(2):  # compiles, plans
        run_step(model, call, batch)
    model.zero_grad()
    with AllocationRecord(torch.device("cpu")) as record:
        run_step(model, call, batch)
    return max(accumulate(change.nbytes for change in record.changes))


def compiled(model: nn.Module) -> nn.Module:
    call: nn.Module = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    return call


def profile_model(name: str) -> str:
    """Return the profile of the compiled model as JSON."""
    model, batch = medium.build(name)
    found = profile(compiled(model), **batch)
    return found.to_json()


def reference_gradients(name: str) -> Gradients:
    model, batch = medium.build(name)
    run_step(model, compiled(model), batch)
    return Gradients.of(model)


def run_torch(name: str, budget: float, solver: str, text: str, reference: Gradients) -> Outcome:
    """Train a step under `activation_memory_budget`."""
    found = Profile.from_json(text)
    again: list[int] = []  # positions of ops among those of forward

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        joint.graph.eliminate_dead_code()
        position = {node.name: i for i, node in enumerate(JointGraph.of(joint.graph, num_fwd_outputs).ops)}
        if len(position) != len(found.ops):
            raise RuntimeError(
                f"{name}: {len(position)} ops in the joint graph, {len(found.ops)} in the profile"
            )
        halves = min_cut_rematerialization_partition(
            joint, inputs, num_fwd_outputs=num_fwd_outputs, **options
        )
        again[:] = [
            position[n.name] for n in halves[1].graph.nodes if n.op != "placeholder" and n.name in position
        ]
        return halves

    backend = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True)
    model, batch = medium.build(name)
    with config.patch(activation_memory_budget=budget, activation_memory_budget_solver=solver):
        call = torch.compile(model, backend=backend)
        peak = measured(model, call, batch)
    return outcome_of(found, again, peak, model, batch, call, reference)


def run_ours(name: str, policy: str, text: str, reference: Gradients) -> Outcome:
    """Train a step under our policy."""
    found = Profile.from_json(text)
    model, batch = medium.build(name)
    read = Policy.from_json(policy)
    call = ac_client.apply(compiled(model), policy=read)
    peak = measured(model, call, batch)
    again = [i for i, decision in enumerate(read.decisions.values()) if decision != "save"]
    return outcome_of(found, again, peak, model, batch, call, reference)


def outcome_of(
    found: Profile,
    again: list[int],
    peak: int,
    model: nn.Module,
    batch: dict[str, Any],
    call: Callable[..., Any],
    reference: Gradients,
) -> Outcome:
    """Return the outcome of a step that recomputes the ops `again`."""
    run_step(model, call, batch)
    names = found.keys()
    return Outcome(
        peak,
        sum(found.ops.runtime_us[i] for i in again),
        sum(any(part in names[i] for part in MATMULS) for i in again),
        Gradients.of(model).error(reference),
    )


def compare(name: str) -> tuple[list[Row], str]:
    """Return the rows of one model, and what is to be said of the smallest peaks."""
    text = run_in_child(profile_model, name)
    reference = run_in_child(reference_gradients, name)
    found = Profile.from_json(text)
    graph = build(found)
    forward_us = sum(found.ops.runtime_us)
    rows = []
    for budget in BUDGETS:
        for solver in SOLVERS:
            torchs = run_in_child(run_torch, name, budget, solver, text, reference)
            try:
                policy = plan(found, budget_bytes=graph.static_bytes + torchs.peak).policy()
            except (InfeasibleBudget, SolverOutOfTime):
                ours = None
            else:
                ours = run_in_child(run_ours, name, policy.to_json(), text, reference)
                predicted = policy.predicted.peak_bytes - graph.static_bytes
                if ours.peak != predicted:
                    raise RuntimeError(f"{name}: measured {ours.peak} B where {predicted} B was predicted")
            rows.append(Row(name, f"{budget} {solver}", torchs, ours, forward_us))
            print(line_of(rows[-1]), flush=True)
    lowest = find_minimum_peak(found).found - graph.static_bytes
    torchs_lowest = min(row.torchs.peak for row in rows)
    return rows, f"{name}: smallest peak {lowest / MIB:.2f} MiB, torch {torchs_lowest / MIB:.2f} MiB"


def line_of(row: Row) -> tuple[str, ...]:
    ours = row.ours
    return (
        row.model,
        row.setting,
        f"{row.torchs.peak / MIB:.2f}",
        f"{row.torchs.recompute_us / row.forward_us:.3f}",
        str(row.torchs.matmuls),
        f"{row.torchs.gradient_error:.0e}",
        "does not fit" if ours is None else f"{ours.peak / MIB:.2f}",
        "" if ours is None else f"{ours.recompute_us / row.forward_us:.3f}",
        "" if ours is None else str(ours.matmuls),
        "" if ours is None else f"{ours.gradient_error:.0e}",
        f"{row.ratio:.2f}",
    )


HEAD = (
    "model",
    "torch's budget and solver",
    "peak, MiB",
    "recompute / forward",
    "matmuls again",
    "gradient error",
    "our peak, MiB",
    "recompute / forward",
    "matmuls again",
    "gradient error",
    "ours / torch",
)


def report(rows: list[Row], notes: list[str]) -> str:
    """Return the page: losses first, then the rest, and the summary."""
    ordered = sorted(rows, key=lambda row: -row.ratio)
    finite = [row.ratio for row in rows if row.ours is not None]
    mean = math.exp(sum(map(math.log, finite)) / len(finite))
    slower = sum(row.ratio > 1 for row in rows)
    wrong = sum(row.torchs.gradient_error > MOST_ERROR for row in rows)
    summary = (
        f"{len(rows)} peaks. Ours is slower at {slower}; geometric mean of recompute time {mean:.2f}. "
        f"torch's gradients are wrong (relative error above {MOST_ERROR}) at {wrong}."
    )
    return "\n\n".join(
        [summary, "\n".join(f"- {note}" for note in notes), markdown_table(HEAD, map(line_of, ordered))]
    )


def main() -> None:
    """Compare the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=MODELS, metavar="MODEL")
    add_out_argument(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    notes: list[str] = []
    for name in options.only:
        more, note = compare(name)
        rows += more
        notes.append(note)
    write_result(report(rows, notes), options.out)


if __name__ == "__main__":
    main()
