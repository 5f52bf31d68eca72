"""Prepare the data of a page that draws memory over a step and says what is live when.

The data have the simulated step under the plan, and the same step with nothing recomputed and with every
block recomputed. They are columns of numbers and a few tables of names, so
that steps of tens of thousands of ops stay small.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any

from autoac.planner.formats.op_key import OpKey
from autoac.planner.formats.policy import Policy
from autoac.planner.memory.clocks import Copy, runtime_us_of
from autoac.planner.memory.lifetimes import lives
from autoac.planner.memory.schedule import Backward, Compute, Event, Free, Recompute, recompute_us
from autoac.planner.memory.simulate import extra_bytes, simulate, waiting_bytes
from autoac.planner.plan import Plan
from autoac.planner.problem.graph import BackwardStep, Graph, OpId, SaveSet
from autoac.planner.problem.moves import handling_us
from autoac.planner.problem.save_sets import with_forced_saves
from autoac.planner.report.by_module import (
    Decision,
    ModuleRow,
    OpDecision,
    by_module,
    fold_paths,
    op_decisions,
)
from autoac.planner.report.checkpointed_blocks import every_block_recomputed

FORWARD, RECOMPUTE, FETCH, BACKWARD, OPTIMIZER = range(5)
"""Kinds of event. FETCH begins a copy from the host. OPTIMIZER is the last."""


@dataclass(frozen=True, slots=True)
class Track:
    """One simulated step. Columns are by event, but for those of `lives`."""

    id: str  # "plan", "plain", "blocks"
    name: str
    peak: int  # event
    recompute_us: float
    end_us: float  # forward and backward are over
    begin_us: tuple[float, ...]
    live_bytes: tuple[int, ...]
    beside_bytes: tuple[int, ...]  # of them: gradients, temporaries, workspace
    waiting_bytes: tuple[int, ...]  # of them: held by other microbatches
    kind: tuple[int, ...]
    at: tuple[int, ...]  # FORWARD, RECOMPUTE, FETCH: into Picture.ops; BACKWARD: into Picture.steps
    lives: LiveIntervals


@dataclass(frozen=True, slots=True)
class LiveIntervals:
    """When storage versions are live: by version, from event `begin` up to event `end`."""

    op: tuple[int, ...]
    nbytes: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    why: tuple[int, ...]  # into Picture.reasons


@dataclass(frozen=True, slots=True)
class Names:
    """The names of ops, or of steps of backward."""

    module: tuple[int, ...]  # into Picture.modules
    label: tuple[int, ...]  # into Picture.labels


@dataclass(frozen=True, slots=True)
class Layer:
    """Layers for whose ops the plan makes the same decisions. Numbers are sums over all of them."""

    name: str  # "model.layers.0-11"; "" for what is outside all layers
    layers: int
    kept_bytes: int
    recomputed_bytes: int
    recompute_us: float
    moved_bytes: int
    modules: tuple[ModuleRow, ...]  # without their paths


@dataclass(frozen=True, slots=True)
class Picture:
    """All data of a page about one plan. Bytes and microseconds."""

    model: str
    device: str
    inputs: tuple[str, ...]
    budget_bytes: int
    headroom_bytes: int
    corrected_by_bytes: int  # by which the plan's budget was reduced after a measurement
    peak_at: str
    step_us: float
    gap: float
    stopped: str  # why the search for the plan did: a value of `Stopped`
    static: tuple[tuple[str, int], ...]  # (name, bytes)
    modules: tuple[str, ...]
    labels: tuple[str, ...]
    reasons: tuple[str, ...]
    ops: Names
    steps: Names
    tracks: tuple[Track, ...]  # the plan's first
    copies: tuple[Copy, ...]  # of the plan's track; `op` is into `ops`
    layers: tuple[Layer, ...]
    measured_peak_bytes: int | None  # of a step that carried out the plan

    def data(self) -> dict[str, Any]:
        """Return the picture as dictionaries, lists and numbers, ready for JSON."""
        return {one.name: _plain(getattr(self, one.name)) for one in fields(self)}


def picture(plan: Plan, *, policy: Policy | None = None, measured_peak_bytes: int | None = None) -> Picture:
    """Return the data to draw `plan`. `as_planned` makes a plan from a Policy and its Profile.

    Args:
        plan: the decision; its peak is the first track's.
        policy: the policy that is carried out, if it says more than the plan: the budget before a correction.
        measured_peak_bytes: of a step that carried out the plan.
    """
    graph, profile = plan.graph, plan.profile
    unmoved = graph if plan.unmoved is None else plan.unmoved
    modules: dict[str, int] = {}
    labels: dict[str, int] = {}
    reasons: dict[str, int] = {}
    keys = [OpKey.parse(op.name) for op in graph.ops]
    op_names = Names(
        tuple(_position(modules, key.module) for key in keys),
        tuple(_position(labels, key.label) for key in keys),
    )
    step_names = Names(
        tuple(_position(modules, m) for m in _modules_of_steps(unmoved, [key.module for key in keys])),
        tuple(_position(labels, step.name) for step in graph.steps),
    )
    tracks = [_track("plan", "this plan", graph, plan.save_set, reasons, plan)]
    drawn = {with_forced_saves(graph, plan.save_set)}
    for id_, name, other in (
        ("plain", "nothing recomputed", graph.everything),
        ("blocks", "every block recomputed", every_block_recomputed(unmoved)),
    ):
        if other is not None and with_forced_saves(graph, other) not in drawn:
            drawn.add(with_forced_saves(graph, other))
            tracks.append(_track(id_, name, unmoved, other, reasons))
    if profile is not None:
        static = profile.static
        standing = [
            ("parameters", static.parameters),
            ("buffers", static.buffers),
            ("gradients before the step", static.gradients),
            ("optimizer state", static.optimizer_state),
            ("the batch", static.inputs),
            ("workspaces of cuBLAS", static.workspaces),
        ]
        # Constraints can add to what the profile has.
        standing.append(("not in the profile", graph.static_bytes - static.total))
    else:
        standing = [("static", graph.static_bytes)]
    return Picture(
        model=profile.model if profile else "a graph",
        device=profile.environment.device_name if profile else "",
        inputs=profile.inputs if profile else (),
        budget_bytes=policy.budget_bytes
        if policy is not None
        else plan.budget + plan.constraints.headroom_bytes,
        headroom_bytes=plan.constraints.headroom_bytes,
        corrected_by_bytes=policy.corrected_by_bytes if policy is not None else 0,
        peak_at=plan.peak_at,
        step_us=plan.step_us,
        gap=plan.gap,
        stopped=plan.stopped.value,
        static=tuple((name, nbytes) for name, nbytes in standing if nbytes),
        modules=tuple(modules),
        labels=tuple(labels),
        reasons=tuple(reasons),
        ops=op_names,
        steps=step_names,
        tracks=tuple(tracks),
        copies=plan.timing.copies if plan.timing is not None else (),
        layers=_layers(op_decisions(graph, plan.save_set, plan.moved)),
        measured_peak_bytes=measured_peak_bytes,
    )


def _track(
    id_: str, name: str, graph: Graph, save_set: SaveSet, reasons: dict[str, int], plan: Plan | None = None
) -> Track:
    moved = plan.moved if plan is not None else frozenset()
    timeline = simulate(graph, save_set)
    # A free takes no time: its memory is gone at the next kernel.
    events = [i for i, instant in enumerate(timeline.instants) if not isinstance(instant.event, Free)]
    instants = [timeline.instants[i] for i in events]
    *begin_us, end_us = accumulate((runtime_us_of(graph, i.event) for i in instants), initial=0.0)
    if plan is not None and plan.timing is not None:  # compute also waits for copies
        begin_us, end_us = [plan.timing.begin_us[i] for i in events], plan.timing.end_us
    waiting = graph.waiting_microbatches * waiting_bytes(graph, save_set) if graph.waiting_microbatches else 0
    kinds, at = zip(*(_kind(instant.event, moved) for instant in instants), strict=True)
    intervals = [
        (int(graph.versions[life.value].op), life.nbytes, begin, end, _position(reasons, life.why))
        for life in lives(graph, save_set, timeline, moved)
        if (begin := bisect_left(events, life.begin)) < (end := bisect_left(events, life.end))
    ]
    columns = list(zip(*intervals, strict=True)) or [()] * 5
    peak = max(range(len(instants)), key=lambda e: instants[e].live_bytes)
    return Track(
        id=id_,
        name=name,
        peak=peak,
        recompute_us=recompute_us(graph, save_set) - handling_us(graph, moved),
        end_us=end_us,
        begin_us=tuple(round(us, 2) for us in begin_us),
        live_bytes=tuple(instant.live_bytes for instant in instants),
        beside_bytes=tuple(extra_bytes(graph, timeline.instants[i].event) for i in events),
        waiting_bytes=(waiting,) * (len(instants) - 1) + (0,) if waiting else (),
        kind=kinds,
        at=at,
        lives=LiveIntervals(*columns),
    )


def _kind(event: Event, moved: Collection[OpId]) -> tuple[int, int]:
    """Return the kind of `event`, and which op or backward step it is; -1 for the optimizer."""
    match event:
        case Compute(op):
            return FORWARD, int(op)
        case Recompute(op):
            return FETCH if op in moved else RECOMPUTE, int(op)
        case Backward(step):
            return BACKWARD, int(step)
        case _:
            return OPTIMIZER, -1


def _modules_of_steps(graph: Graph, modules: Sequence[str]) -> Iterator[str]:
    """Yield for each step of backward the module whose op it differentiates, as far as that is known.

    A step is known by its unpacks: an op saves its inputs before it starts and its outputs after. A step
    that unpacks nothing belongs to the step before it.
    """
    module = ""
    for step in graph.steps:
        module = _module_of(graph, step, modules) or module
        yield module


def _module_of(graph: Graph, step: BackwardStep, modules: Sequence[str]) -> str:
    for h in step.unpacks:
        handle = graph.saved_tensors[h]
        around = [
            op
            for op in graph.ops[max(handle.packed - 1, 0) : handle.packed + 1][::-1]
            if handle.version in op.reads or handle.version in op.writes
        ]
        alike = [op for op in around if _squashed(OpKey.parse(op.name).op) == _squashed(step.name)]
        for op in alike or around:
            return modules[op.id]
    return modules[graph.versions[graph.saved_tensors[step.unpacks[0]].version].op] if step.unpacks else ""


def _squashed(name: str) -> str:
    """Return the common part of `aten._log_softmax.default` and `LogSoftmaxBackward0`: `logsoftmax`."""
    name = name.removeprefix("aten.").partition(".")[0].partition("Backward")[0]
    return name.replace("_", "").lower()


def _layers(ops: Sequence[OpDecision]) -> tuple[Layer, ...]:
    layers: dict[str, list[OpDecision]] = {}
    for op in ops:
        layers.setdefault(OpKey.parse(op.key).block(), []).append(op)

    def within(layer: str) -> object:
        return tuple((op.key.removeprefix(layer), op.decision) for op in layers[layer])

    rows = []
    for name, paths in fold_paths(layers, within):
        of_all = [op for path in paths for op in layers[path]]
        if all(op.decision is Decision.UNUSED for op in of_all):
            continue
        rows.append(
            Layer(
                name=name,
                layers=len(paths),
                kept_bytes=sum(op.kept_bytes for op in of_all if op.decision is not Decision.MOVED),
                recomputed_bytes=sum(op.recomputed_bytes for op in of_all),
                recompute_us=sum(op.runtime_us for op in of_all),
                moved_bytes=sum(op.kept_bytes for op in of_all if op.decision is Decision.MOVED),
                modules=tuple(replace(row, modules=()) for row in by_module(of_all)),
            )
        )
    return tuple(rows)


def _plain(value: Any) -> Any:
    """Return dataclasses as dicts. Not `asdict`, which copies each number of a column, one by one."""
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return [_plain(one) for one in value]
    return value


def _position(table: dict[str, int], text: str) -> int:
    """Return the position of `text` in `table`, where it is added if it is new."""
    return table.setdefault(text, len(table))
