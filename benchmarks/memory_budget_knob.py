"""Compare plans of compiled models with torch's `activation_memory_budget`, at the peaks that torch reaches.

Both sides cut the same joint graph, run it node by node (`aot_eager`), and pay for recomputed ops by the same
clock: the op times of our profile. Each peak that torch reaches is the allocator's, and becomes the budget of
a plan, which `apply` carries out. Dropout is off: torch's gradients are wrong with it (pytorch#190758).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition

import ac_client
from autoac.planner import Policy, Profile, build, find_minimum_peak, plan
from autoac.planner.errors import InfeasibleBudget, SolverOutOfTime
from autoac.profiler import profile
from autoac.profiler.compiler.second_stage import BoxedCall, CompiledPart, carried_by
from autoac.profiler.joint_graph.decided_part import ops_of
from autoac.profiler.joint_graph.joint_graph import JointGraph, simplify
from benchmarks.models import medium
from benchmarks.models.batches import ModelAndBatch
from benchmarks.models.gpt2 import gpt2
from benchmarks.results import bench_parser, chosen, markdown_table, shown, write_result
from benchmarks.steps import Trainee

MIB = 2**20
BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.2, 0.05, 0.0)
SOLVERS = ("dp", "ilp")
LEAST_TIME = 0.001  # of forward: times below count as this, so that ratios mean something

DROPOUTS = (nn.Dropout, nn.Dropout2d)

Setting = tuple[float, str]
"""A value of `activation_memory_budget`, and the solver that looks for what to save."""

SETTINGS: list[Setting] = [(budget, solver) for budget in BUDGETS for solver in SOLVERS]


def gpt2_of_4_layers() -> ModelAndBatch:
    model = gpt2(layers=4, width=256, heads=8, vocabulary=medium.VOCABULARY, positions=256)
    return model, medium.tokens(2, 256)


def llama_of_4_layers() -> ModelAndBatch:
    wide = medium.WIDE | {"num_hidden_layers": 4}
    options = transformers.LlamaConfig(
        **wide, vocab_size=medium.VOCABULARY, num_key_value_heads=2, use_cache=False
    )
    return transformers.LlamaForCausalLM(options), medium.tokens(2, 256)


def small_batch(name: str) -> ModelAndBatch:
    model, batch = medium.MODELS[name]()
    return model, {key: value[:2] if isinstance(value, Tensor) else value for key, value in batch.items()}


MODELS: dict[str, Callable[[], ModelAndBatch]] = {
    "GPT-2": gpt2_of_4_layers,
    "Llama": llama_of_4_layers,
    **{name: partial(small_batch, name) for name in ("BERT", "T5", "ViT", "ResNet", "U-Net", "DenseNet")},
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A training step: bytes of its peak beyond the static ones, and what it recomputed."""

    peak: int
    recompute_us: float
    matmuls: int  # that ran again: ops for which torch counts FLOPs; it counts none for a CPU's attention
    flops: int  # of the ops that ran again


@dataclass(frozen=True, slots=True)
class Row:
    """A peak that torch reaches, and our plan at that peak; None if none fits."""

    model: str
    settings: tuple[Setting, ...]
    torchs: Outcome
    ours: Outcome | None
    by_flops: Outcome | None  # our plan if ops cost their FLOPs, as torch's knob has it
    forward_us: float

    @property
    def ratio(self) -> float:
        """Return our recompute time over torch's; infinite if our plan does not fit."""
        if self.ours is None:
            return math.inf
        least = LEAST_TIME * self.forward_us
        return max(self.ours.recompute_us, least) / max(self.torchs.recompute_us, least)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One model: its rows, and the smallest peak of each side in bytes."""

    rows: tuple[Row, ...]
    smallest: int
    torchs_smallest: int


def without_dropout(model: nn.Module) -> None:
    """Set all probabilities of dropout to 0, those of modules and those that modules pass to functions."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or isinstance(module, DROPOUTS)):
                setattr(module, name, 0.0)


class TorchsKnob:
    """Let torch's partitioner choose what the compiled graphs of one forward save.

    Attributes:
        again: positions of the ops that backward runs again, among those of the profile.
        nodes: names of the nodes that backward runs; they tell one cut from another.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._n = 0  # ops of the graphs that ran
        self.again: list[int] = []
        self.nodes: tuple[str, ...] = ()

    def callable_of(self, part: CompiledPart) -> BoxedCall:
        note = f"ops again {self._setting}"

        def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
            simplify(joint, num_fwd_outputs)
            names = [node.name for node in JointGraph.of(joint.graph, num_fwd_outputs).ops]
            budget, solver = self._setting
            with config.patch(activation_memory_budget=budget, activation_memory_budget_solver=solver):
                halves = min_cut_rematerialization_partition(
                    joint, inputs, num_fwd_outputs=num_fwd_outputs, **options
                )
            part.notes[note] = names, [n.name for n in halves[1].graph.nodes if n.op != "placeholder"]
            return halves

        code = part.compile(self._setting, partition)
        names, late = part.notes[note]
        self.again += [self._n + i for i, name in enumerate(names) if name in late]
        self.nodes += tuple(late)
        self._n += len(ops_of(part))
        return code


class Trained(Trainee):
    """A model whose steps are compared, with its profile, and its gradients without any plan."""

    def __init__(self, make: Callable[[], ModelAndBatch]) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        model, batch = make()
        without_dropout(model.train())
        self.compiled: nn.Module = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
        super().__init__(model, batch, self.compiled)
        self.profile = profile(self.compiled, **batch)
        self.static_bytes = build(self.profile).static_bytes
        self.forward_us = sum(self.profile.ops.runtime_us)
        self._cuts: dict[tuple[str, ...], Outcome] = {}  # torch's, by the nodes of backward
        self.step()
        self._gradients = self.gradients()

    def with_torchs_knob(self, setting: Setting) -> Outcome:
        """Train under `activation_memory_budget`."""
        knob = TorchsKnob(setting)
        with carried_by(knob):
            self.call(**self.batch)
        if knob.nodes not in self._cuts:
            peak = self._checked_peak(lambda: carried_by(TorchsKnob(setting)))
            self._cuts[knob.nodes] = self._outcome(peak, knob.again)
        return self._cuts[knob.nodes]

    def with_plan(self, peak: int) -> Outcome | None:
        """Train under our plan whose peak beyond the static bytes is at most `peak`; None if none fits."""
        planned = self._planned(self.profile, peak)
        if planned is None:
            return None
        policy, outcome = planned
        ac_client.apply(self.compiled, policy=policy)
        measured = self._checked_peak(contextlib.nullcontext)
        ac_client.applied(self.compiled).remove()
        if measured != outcome.peak:
            raise RuntimeError(f"measured {measured} B, predicted {outcome.peak} B")
        return outcome

    def planned_by_flops(self, peak: int) -> Outcome | None:
        """Return what our plan would recompute if an op cost its FLOPs, and at least one."""
        flops = tuple(max(1.0, float(flops)) for flops in self.profile.ops.flops)
        ops = self.profile.ops.model_copy(update={"runtime_us": flops})
        planned = self._planned(self.profile.model_copy(update={"ops": ops}), peak)
        return None if planned is None else planned[1]

    def _planned(self, priced: Profile, peak: int) -> tuple[Policy, Outcome] | None:
        try:
            policy = plan(priced, budget_bytes=self.static_bytes + peak).policy()
        except (InfeasibleBudget, SolverOutOfTime):
            return None
        again = [i for i, decision in enumerate(policy.decisions.values()) if decision != "save"]
        return policy, self._outcome(policy.predicted.peak_bytes - self.static_bytes, again)

    def _outcome(self, peak: int, again: Sequence[int]) -> Outcome:
        flops = [self.profile.ops.flops[i] for i in again]
        recompute_us = sum(self.profile.ops.runtime_us[i] for i in again)
        return Outcome(peak, recompute_us, sum(count > 0 for count in flops), sum(flops))

    def _checked_peak(self, carried: Callable[[], AbstractContextManager[None]]) -> int:
        """Return the peak of a step beyond what was allocated before it, in bytes; check its gradients."""
        with carried():
            self.step()  # compiles
        if not all(map(torch.allclose, self.gradients(), self._gradients)):
            raise RuntimeError("the gradients are wrong")
        with carried():
            return self.peak()


def compare(
    name: str, make: Callable[[], ModelAndBatch], settings: Sequence[Setting] = SETTINGS
) -> Comparison:
    """Return the rows of one model: one for each peak that torch reaches."""
    trained = Trained(make)
    reached: dict[Outcome, list[Setting]] = {}
    for setting in settings:
        reached.setdefault(trained.with_torchs_knob(setting), []).append(setting)
    planned = (
        Row(
            name,
            tuple(same),
            torchs,
            trained.with_plan(torchs.peak),
            trained.planned_by_flops(torchs.peak),
            trained.forward_us,
        )
        for torchs, same in reached.items()
    )
    rows = shown(planned, line_of)
    smallest = find_minimum_peak(trained.profile).found - trained.static_bytes
    return Comparison(tuple(rows), smallest, min(row.torchs.peak for row in rows))


def ratio_of(ours: int, torchs: int) -> str:
    return f"{ours / torchs:.2f}" if torchs else "1.00" if ours == 0 else "inf"


def line_of(row: Row) -> tuple[str, ...]:
    ours = row.ours
    solvers = {
        budget: "/".join(s for _, s in same) for budget, same in groupby(row.settings, key=lambda s: s[0])
    }
    return (
        row.model,
        ", ".join(f"{budget:g} {names}" for budget, names in solvers.items()),
        f"{row.torchs.peak / MIB:.2f}",
        f"{row.torchs.recompute_us / row.forward_us:.3f}",
        str(row.torchs.matmuls),
        "does not fit" if ours is None else f"{ours.peak / MIB:.2f}",
        "" if ours is None else f"{ours.recompute_us / row.forward_us:.3f}",
        "" if ours is None else str(ours.matmuls),
        f"{row.ratio:.2f}",
        "" if row.by_flops is None else str(row.by_flops.matmuls),
        "" if row.by_flops is None else ratio_of(row.by_flops.flops, row.torchs.flops),
    )


HEAD = (
    "model",
    "torch's budget, solver",
    "peak, MiB",
    "recompute / forward",
    "matmuls again",
    "our peak, MiB",
    "recompute / forward",
    "matmuls again",
    "time, ours / torch",
    "planned by FLOPs: matmuls again",
    "FLOPs, ours / torch",
)


def report(comparisons: Sequence[Comparison]) -> str:
    """Return the page: the summary, the smallest peaks, and all rows."""
    rows = [row for comparison in comparisons for row in comparison.rows]
    ratios = [row.ratio for row in rows if row.ours is not None]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    summary = (
        f"{len(rows)} peaks. Ours is slower at {sum(row.ratio > 1 for row in rows)}, and does not fit at "
        f"{len(rows) - len(ratios)}; geometric mean of ours / torch {mean:.2f}."
    )
    smallest = markdown_table(
        ("model", "our smallest peak, MiB", "torch's"),
        (
            (found.rows[0].model, f"{found.smallest / MIB:.2f}", f"{found.torchs_smallest / MIB:.2f}")
            for found in comparisons
        ),
    )
    return "\n\n".join([summary, smallest, markdown_table(HEAD, map(line_of, rows))])


def main() -> None:
    """Compare the models that are named, or all."""
    options = bench_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    write_result(report([compare(name, MODELS[name]) for name in chosen(MODELS, options.only)]), options.out)


if __name__ == "__main__":
    main()
