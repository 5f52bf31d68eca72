"""A Plan, a Policy or a failure, in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autoac.planner.errors import PlannerError
from autoac.planner.graph import wanted
from autoac.planner.highs import Stopped
from autoac.planner.plan import Plan
from autoac.planner.policy import Policy
from autoac.planner.simulate import live_at_peak
from autoac.planner.units import format_bytes, format_us

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def explain(subject: Plan | Policy | PlannerError) -> str:
    """What was decided, where the peak is, what it costs and how good that is proven to be.

    Repeated blocks are told once: `h.*.mlp` stands for the `mlp` of every numbered block.
    """
    match subject:
        case Plan():
            return _plan(subject)
        case Policy():
            return _policy(subject)
        case _:
            return str(subject)


@dataclass(slots=True)
class _Kind:
    """One op of a module, over all blocks that look alike."""

    kept: int = 0  # saved and held
    again: int = 0  # run again in backward
    idle: int = 0  # neither: nothing asks for it
    nbytes: int = 0  # of those kept
    runtime_us: float = 0.0  # of those run again


@dataclass(slots=True)
class _Modules:
    """Decisions by module pattern and op."""

    kinds: dict[str, dict[str, _Kind]] = field(default_factory=dict)

    def at(self, key: str) -> _Kind:
        module, _, op = key.partition("/")
        pattern = _NUMBER.sub("*", module)
        name = op.split("#", 1)[0].removeprefix("aten.")
        return self.kinds.setdefault(pattern, {}).setdefault(f"{name}#{op.rpartition('#')[2]}", _Kind())


def _plan(plan: Plan) -> str:
    graph = plan.graph
    asked = wanted(graph, frozenset())
    modules = _Modules()
    for op in graph.ops:
        kind = modules.at(op.name)
        if op.id in plan.recompute_set:
            kind.again += 1
            kind.runtime_us += op.runtime_us
        elif asked[op.id] and _is_held(plan, op.id):
            kind.kept += 1
            kind.nbytes += sum(graph.nbytes(w) for w in op.writes)
        else:
            kind.idle += 1
    lines = [
        f"The peak is {format_bytes(plan.peak)} of a budget of {format_bytes(plan.budget)}"
        f"{f' (and {format_bytes(plan.headroom)} of headroom)' if plan.headroom else ''}; with nothing"
        f" recomputed it would be {format_bytes(plan.ceiling)}.",
        _cost(plan.recompute_us, plan.step_us, len(plan.recompute_set)),
        _proof(plan.gap, plan.bound_us, plan.stopped.value),
        "",
        *_table(modules),
        "",
        f"The peak is at {plan.peak_at}, while these are live:",
        *(
            f"  {format_bytes(h.nbytes):>10}  {h.name}  ({h.why})"
            for h in live_at_peak(graph, plan.save_set)[:8]
        ),
    ]
    return "\n".join(lines)


def _is_held(plan: Plan, op: int) -> bool:
    """Whether backward still finds an output of a saved op."""
    graph = plan.graph
    return any(
        graph.values[w].handles or any(r in plan.recompute_set for r in graph.values[w].readers)
        for w in graph.ops[op].writes
    )


def _policy(policy: Policy) -> str:
    predicted = policy.predicted
    modules = _Modules()
    for key, decision in policy.decisions.items():
        kind = modules.at(key)
        if decision == "save":
            kind.kept += 1
        else:
            kind.again += 1
    again = sum(decision == "recompute" for decision in policy.decisions.values())
    lines = [
        f"A policy for {policy.model} on {policy.device}, inputs {', '.join(policy.inputs) or 'none'}.",
        f"The peak is {format_bytes(predicted.peak_bytes)} of a budget of"
        f" {format_bytes(policy.budget_bytes)}; with nothing recomputed it would be"
        f" {format_bytes(predicted.save_all_peak_bytes)}.",
        f"The peak is at {predicted.peak_at}.",
        _cost(predicted.recompute_us, predicted.step_us, again),
        _proof(predicted.gap, predicted.recompute_bound_us, policy.stopped),
        "",
        *_table(modules),
    ]
    return "\n".join(lines)


def _cost(recompute_us: float, step_us: float, n_ops: int) -> str:
    if not n_ops:
        return "Nothing is recomputed."
    share = f", {recompute_us / step_us:.1%} of the step's {format_us(step_us)}" if step_us > 0 else ""
    return f"{n_ops} ops run again in backward, which takes {format_us(recompute_us)}{share}."


def _proof(gap: float, bound_us: float, stopped: str) -> str:
    if gap == 0:
        return "No plan within this budget recomputes less (proven)."
    proven = (
        f"No plan within this budget recomputes less than {format_us(bound_us)} (proven), a gap of {gap:.1%}"
    )
    if stopped == Stopped.OPTIMAL.value:
        return f"{proven}."
    return f"{proven}; the solver stopped early: {stopped}."


def _table(modules: _Modules) -> Iterable[str]:
    for pattern, kinds in modules.kinds.items():
        kept = _list(kinds, {name: kind.kept for name, kind in kinds.items()})
        again = _list(kinds, {name: kind.again for name, kind in kinds.items()})
        if not kept and not again:
            continue
        yield pattern or "(outside all modules)"
        nbytes = sum(kind.nbytes for kind in kinds.values())
        runtime_us = sum(kind.runtime_us for kind in kinds.values())
        if kept:
            yield f"  keeps {kept}{f'  ({format_bytes(nbytes)})' if nbytes else ''}"
        if again:
            yield f"  recomputes {again}{f'  ({format_us(runtime_us)})' if runtime_us else ''}"


def _list(kinds: Mapping[str, _Kind], counts: Mapping[str, int]) -> str:
    """`addmm.default, mul.Tensor#1 (3 of 12)`: an ordinal where the module has several of an op."""
    several = {name.rpartition("#")[0] for name in kinds if not name.endswith("#0")}
    words = []
    for name, count in counts.items():
        if count:
            kind = kinds[name]
            total = kind.kept + kind.again + kind.idle
            shown = name if name.rpartition("#")[0] in several else name.rpartition("#")[0]
            words.append(shown if count == total else f"{shown} ({count} of {total})")
    return ", ".join(words)
