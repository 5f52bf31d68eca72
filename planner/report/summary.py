"""Explain a Plan or a Policy in words."""

from __future__ import annotations

from collections.abc import Iterable

from autoac.planner.errors import holdings_in_lines
from autoac.planner.formats.policy import Policy
from autoac.planner.formats.profile import BEYOND_DISPATCH
from autoac.planner.memory.lifetimes import live_at_peak
from autoac.planner.plan import Plan
from autoac.planner.problem.graph import Graph
from autoac.planner.problem.use_groups import later_runs
from autoac.planner.report.by_module import (
    Decision,
    OpDecision,
    by_module,
    op_decisions,
    policy_decisions,
    rows_in_words,
    runs_added_up,
)
from autoac.planner.solver.highs import Stopped
from autoac.planner.solver.time_limit import relative_gap
from autoac.planner.units import format_bytes, format_us

SMALL_SHARE = 0.001  # of the step: a solver may stop there without a bound
LARGE_GAP = 0.05  # of the recompute time: a larger gap gets a sentence of its own


def explain(subject: Plan | Policy) -> str:
    """Write the decisions, the peak and its moment, the recompute time, and how near to the best it is.

    Layers that decide alike share an entry: `h.0-11.mlp` stands for the `mlp` of twelve blocks.
    """
    match subject:
        case Plan():
            return _plan(subject)
        case Policy():
            return _policy(subject)


def _plan(plan: Plan) -> str:
    graph, headroom = plan.graph, plan.constraints.headroom_bytes
    decisions = runs_added_up(op_decisions(graph, plan.save_set, plan.moved))
    beyond = [f"{line}." for line in beyond_dispatch_in_words(graph)]
    lines = [
        f"The peak is {format_bytes(plan.peak)} of a budget of {format_bytes(plan.budget)}"
        f"{f' (and {format_bytes(headroom)} of headroom)' if headroom else ''}; with nothing"
        f" recomputed it would be {format_bytes(plan.ceiling)}.",
        *_reserved(plan),
        _cost(plan.recompute_us, plan.step_us, decisions, _spread_us(plan, decisions)),
        *_moves(plan.moved_bytes, plan.stall_us, decisions, plan.why_unmoved),
        _proof(plan.extra_us, plan.bound_us, plan.step_us, plan.stopped.value),
        "",
        *rows_in_words(by_module(decisions)),
        "",
        *beyond,
        *([""] if beyond else []),
        f"The peak is at {plan.peak_at}, while these are live:",
        *holdings_in_lines(live_at_peak(graph, plan.save_set, plan.moved)),
    ]
    return "\n".join(lines)


def _reserved(plan: Plan) -> list[str]:
    """Say what the allocator of a GPU takes from the device for the plan, if that is known."""
    if plan.profile is None or plan.profile.environment.device_type != "cuda":
        return []
    fragments, expandable = plan.fragment_bytes(), plan.fragment_bytes(expandable_segments=True)
    if fragments is None or expandable is None:
        return []
    return [
        f"CUDA's allocator reserves {format_bytes(plan.peak + fragments)} for it, with expandable segments"
        f" {format_bytes(plan.peak + expandable)}."
    ]


def beyond_dispatch_in_words(graph: Graph) -> list[str]:
    """Return for each reason that PyTorch does not show which ops must be saved, and the bytes they make."""
    lines = []
    for reason in BEYOND_DISPATCH:
        ops = [op for op in graph.ops if op.must_save == reason]
        if ops:
            nbytes = sum(graph.nbytes(version) for op in ops for version in op.writes)
            more = f" and {len(ops) - 1} more" if len(ops) > 1 else ""
            lines.append(f"{ops[0].name}{more} must be saved ({format_bytes(nbytes)}): {reason}")
    return lines


def _policy(policy: Policy) -> str:
    predicted = policy.predicted
    decisions = policy_decisions(policy)
    lines = [
        f"A policy for {policy.model} on {policy.device}, inputs {', '.join(policy.inputs) or 'none'}.",
        f"The peak is {format_bytes(predicted.peak_bytes)} of a budget of"
        f" {format_bytes(policy.budget_bytes)}; with nothing recomputed it would be"
        f" {format_bytes(predicted.save_all_peak_bytes)}.",
        f"The peak is at {predicted.peak_at}.",
        _cost(predicted.recompute_us, predicted.step_us, decisions),
        *_moves(predicted.moved_bytes, predicted.stall_us, decisions),
        _proof(
            predicted.recompute_us + predicted.stall_us,
            predicted.recompute_bound_us,
            predicted.step_us,
            policy.stopped,
        ),
        "",
        *rows_in_words(by_module(decisions)),
    ]
    return "\n".join(lines)


def _spread_us(plan: Plan, decisions: Iterable[OpDecision]) -> float:
    """Return by how much the recompute time may be off, by the spread of measured run times."""
    if plan.profile is None:
        return 0.0
    later = later_runs(plan.graph)
    names = (op.name for op in plan.graph.ops if op.id not in later)
    spread_us = dict(zip(names, plan.profile.ops.spread_us, strict=True))
    return sum(op.runs * spread_us[op.key] for op in decisions if op.decision is Decision.RECOMPUTED)


def _cost(
    recompute_us: float, step_us: float, decisions: Iterable[OpDecision], spread_us: float = 0.0
) -> str:
    runs = [op.runs for op in decisions if op.decision is Decision.RECOMPUTED]
    if not runs:
        return "Nothing is recomputed."
    several = sum(n > 1 for n in runs)
    repeated = f" ({several} of them several times)" if several else ""
    share = f", {recompute_us / step_us:.1%} of the step's {format_us(step_us)}" if step_us > 0 else ""
    least, most = format_us(max(0.0, recompute_us - spread_us)), format_us(recompute_us + spread_us)
    between = f" ({least} to {most} by the spread of its run times)" if least != most else ""
    takes = f"{format_us(recompute_us)}{between}{share}"
    return f"{len(runs)} ops run again in backward{repeated}, which takes {takes}."


def _moves(
    moved_bytes: int, stall_us: float, decisions: Iterable[OpDecision], why_not: str = ""
) -> list[str]:
    """Return what moves to the host; nothing if the host was not to be used."""
    n = sum(op.decision is Decision.MOVED for op in decisions)
    if not n:
        return [f"Nothing moves to the host: {why_not}."] if why_not else []
    waits = f"compute waits {format_us(stall_us)} for them" if stall_us else "compute never waits for them"
    return [f"Outputs of {n} ops ({format_bytes(moved_bytes)}) move to the host and back; {waits}."]


def _proof(recompute_us: float, bound_us: float, step_us: float, stopped: str) -> str:
    """Return what is proven of the schedules that the planner considers (docs/formulation.md)."""
    gap = relative_gap(recompute_us, bound_us)
    if stopped == Stopped.OPTIMAL.value and not bound_us and recompute_us > SMALL_SHARE * step_us:
        return "The solver reached its gap by other run times; how good the plan is by these is not known."
    of_step = f" and {(recompute_us - bound_us) / step_us:.2%} of the step" if step_us > 0 else ""
    proven = "No plan considered recomputes less within this budget (proven)"
    if gap > 0:
        proven = (
            f"No plan considered within this budget recomputes less than {format_us(bound_us)} (proven): "
            f"a gap of {gap:.1%} of the recompute{of_step}"
        )
    if stopped != Stopped.OPTIMAL.value:
        proven = f"{proven}; the solver stopped early: {stopped}"
        if gap > LARGE_GAP:
            return f"{proven}. The gap is large: a longer search may find a faster plan."
        return f"{proven}."
    if gap > LARGE_GAP:
        return f"{proven}, too little of the step to search on."
    return f"{proven}."
