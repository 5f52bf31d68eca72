"""Answer what another decision would change: one op saved or recomputed instead, or a larger budget.

All numbers come from the simulator, for a save set near the plan's; nothing is estimated.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from autoac.planner.errors import OtherProfile, UnknownKey
from autoac.planner.formats.constraints import Constraints
from autoac.planner.formats.policy import SAVE, Policy
from autoac.planner.formats.profile import Profile
from autoac.planner.memory.clocks import timing
from autoac.planner.memory.schedule import Compute, recompute_us
from autoac.planner.memory.simulate import Timeline, instant_name, simulate
from autoac.planner.plan import Plan, moving, plan_of
from autoac.planner.plan import plan as plan_again
from autoac.planner.problem.apply_constraints import constrained
from autoac.planner.problem.graph import Graph, Moment, OpId
from autoac.planner.problem.moves import Link, Move, handling_us, triggers, with_moves
from autoac.planner.problem.save_sets import (
    unsaved_with,
    with_forced_saves,
    without_cost_free_recomputes,
)
from autoac.planner.problem.stage import stage_graph
from autoac.planner.problem.use_groups import with_use_groups
from autoac.planner.report.by_module import Decision, op_decisions
from autoac.planner.solver.highs import Stopped
from autoac.planner.solver.recompute_windows import Role, find_windows
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.variables import Options
from autoac.planner.units import GIB, format_bytes, format_us


@dataclass(frozen=True, slots=True)
class Why:
    """The effect of the opposite decision about one op. Bytes and microseconds."""

    key: str
    fate: Decision  # as planned
    must_save: str  # the reason why the planner had no choice; "" if it had one
    must_recompute: bool  # because the user pinned it
    follows: str  # key of the op that is saved instead, if one of the two is; "" if none
    at_peak_bytes: int  # more bytes live at the moment of the planned peak; negative: fewer
    peak: int  # of the whole step
    peak_at: str
    recompute_us: float  # of the whole step
    gain_us: float  # recomputed less than planned; negative: more
    planned_peak: int
    planned_peak_at: str
    budget: int
    gap: float  # of the plan: how far from the best it may be
    forward_over: int = 0  # by how much forward would exceed a budget of its own; 0: it would not

    @property
    def fits(self) -> bool:
        """Return True if the plan with the opposite decision keeps its budget, and forward keeps its own."""
        return self.peak <= self.budget and not self.forward_over


@dataclass(frozen=True, slots=True)
class Marginal:
    """The recomputed op whose saving gains the most time for each byte that the peak grows."""

    key: str
    extra_bytes: int  # by which the peak grows
    gain_us: float
    peak_at: str


@dataclass(frozen=True, slots=True)
class More:
    """The effect of a larger budget on peak and recompute time. Sizes are in bytes, times in microseconds."""

    budget: int  # of the plan that is compared with
    larger: int  # the other budget, or the ceiling if that is less
    ceiling: int  # from here on nothing is recomputed
    peak: int  # of the new plan
    recompute_us: float  # with `budget`
    recompute_us_then: float  # with `larger`
    bound_us_then: float  # proven: no plan within `larger` recomputes less
    next: Marginal | None  # the first op to save; None if none helps by itself
    plan: Plan | None  # within `larger`; None if nothing is recomputed already

    @property
    def gain_us(self) -> float:
        """Return the time that the larger budget saves in each step."""
        return self.recompute_us - self.recompute_us_then


def find_op(graph: Graph, key: str) -> OpId:
    """Return the op that `key` names: its whole key, or an ending that no other key has.

    Raises:
        UnknownKey: `key` names no op, or several.
    """
    names = [op.name for op in graph.ops]
    if key in names:
        return OpId(names.index(key))
    ending = [i for i, name in enumerate(names) if name.endswith((key, f"{key}#0"))]
    if key and len(ending) == 1:
        return OpId(ending[0])
    near = [names[i] for i in ending[:5]] or difflib.get_close_matches(key, names, 5, 0.5)
    raise UnknownKey(key, near, len(names))


def why(plan: Plan, key: str) -> Why:
    """Return what the opposite decision about the op `key` would cost and gain.

    All other decisions stay, except that ops that backward does not need any more are not run again.

    Raises:
        UnknownKey: the plan has no such op, or `key` is short for several.
    """
    graph = plan.graph
    op = find_op(graph, key)
    name = graph.ops[op].name
    windows = find_windows(graph)
    decisions = op_decisions(graph, plan.save_set, plan.moved)
    fate = decisions[op].decision
    # Start from what is really saved: a save set also names ops that backward does not need.
    saved = graph.must_save | {OpId(i) for i, d in enumerate(decisions) if d.decision is Decision.SAVED}
    if fate in (Decision.RECOMPUTED, Decision.MOVED):
        other = without_cost_free_recomputes(graph, saved | {op})
    else:
        saved -= {op}
        if op in with_forced_saves(graph, saved):
            saved -= frozenset(unsaved_with(graph, op)) - graph.must_save
        other = without_cost_free_recomputes(graph, saved)
    before, after = simulate(graph, plan.save_set), simulate(graph, other)
    new_us = recompute_us(graph, other) - handling_us(graph, plan.moved - other)
    leader = windows.leader[op]
    return Why(
        key=name,
        fate=fate,
        must_save=graph.ops[op].must_save,
        must_recompute=graph.ops[op].must_recompute,
        follows=graph.ops[leader].name if leader != op and windows.role[op] is Role.FOLLOWS else "",
        at_peak_bytes=_most_at(after, before.peak.moment) - before.peak.live_bytes,
        peak=after.peak.live_bytes,
        peak_at=instant_name(graph, after.peak),
        recompute_us=new_us,
        gain_us=plan.recompute_us - new_us,
        planned_peak=plan.peak,
        planned_peak_at=plan.peak_at,
        budget=plan.budget,
        gap=plan.gap,
        forward_over=_forward_over(plan, after),
    )


def _forward_over(plan: Plan, timeline: Timeline) -> int:
    rules = plan.constraints
    if rules is None or rules.forward_budget_bytes is None:
        return 0
    most = max((i.live_bytes for i in timeline.instants if isinstance(i.event, Compute)), default=0)
    return max(most - (rules.forward_budget_bytes - plan.headroom), 0)


def more(
    plan: Plan,
    extra_bytes: int = GIB,
    *,
    planning: Callable[[Profile | Graph, int], Plan] | None = None,
    tried: int = 40,
) -> More:
    """Return how much time a budget larger by `extra_bytes` would save.

    Args:
        plan: the plan to improve.
        extra_bytes: by how much the budget grows; a budget above the ceiling saves no more.
        planning: plans a profile or graph within a budget in bytes; by default `plan()`.
        tried: how many recomputed ops to save on trial for `next`, one at a time, those with the most time
            per byte first. Each trial is one run of the simulator.
    """
    if extra_bytes <= 0:
        raise ValueError(f"extra_bytes must be positive, got {extra_bytes}")
    graph = plan.graph
    larger = min(plan.budget + extra_bytes, max(plan.ceiling, plan.budget))
    then = None
    if plan.recompute_set and larger > plan.budget:
        rules = plan.constraints
        if rules is not None and plan.profile is None:
            rules = rules.beyond_the_graph
        within = planning or (
            lambda subject, budget: plan_again(subject, budget_bytes=budget, constraints=rules)
        )
        then = within(plan.profile or graph, larger)
    return More(
        budget=plan.budget,
        larger=larger,
        ceiling=plan.ceiling,
        peak=then.peak if then else plan.peak,
        recompute_us=plan.recompute_us,
        recompute_us_then=min(then.recompute_us, plan.recompute_us) if then else plan.recompute_us,
        bound_us_then=then.bound_us if then else plan.bound_us,
        next=marginal(plan, tried),
        plan=then,
    )


def marginal(plan: Plan, tried: int = 40) -> Marginal | None:
    """Return the best single op to save in addition: the most time gained per byte of higher peak.

    None if saving one more op gains nothing, or nothing is recomputed.
    """
    graph = plan.graph

    def worth(op: OpId) -> float:
        return graph.ops[op].recompute_us / max(sum(graph.nbytes(w) for w in graph.ops[op].writes), 1)

    best: tuple[float, Marginal] | None = None
    for op in sorted(plan.recompute_set, key=lambda o: (-worth(o), o))[:tried]:
        other = without_cost_free_recomputes(graph, plan.save_set | {op})
        gain = plan.recompute_us - recompute_us(graph, other)
        if gain <= 0:
            continue
        timeline = simulate(graph, other)
        extra = max(timeline.peak.live_bytes - plan.peak, 0)
        rate = gain / max(extra, 1)
        if best is None or rate > best[0]:
            best = rate, Marginal(graph.ops[op].name, extra, gain, instant_name(graph, timeline.peak))
    return best[1] if best else None


def as_planned(policy: Policy, profile: Profile) -> Plan:
    """Rebuild the plan of `policy` on a profile with the same ops, without solving.

    Peak and time are the simulator's on `profile`. The bound is the one that the policy states, if `profile`
    is the one that it was planned from; nothing is proven for other run times.

    Raises:
        OtherProfile: `policy` and `profile` do not have the same ops.
    """
    keys = profile.keys()
    if list(policy.decisions) != keys:
        only = [key for key in policy.decisions if key not in set(keys)]
        only += [key for key in keys if key not in policy.decisions]
        raise OtherProfile(policy.model, profile.model, only[0] if only else keys[0])
    plan = carried(policy, profile)
    if policy.profile_digest != profile.digest:
        return plan
    return replace(plan, bound_us=min(policy.predicted.recompute_bound_us, plan.extra_us))


def carried(policy: Policy, profile: Profile) -> Plan:
    """Carry `policy` out on any profile, perhaps another model's, and return the plan, without solving.

    As in the runtime, an op that the policy does not know is saved. Peak and time are the simulator's on
    `profile`; no bound on the time is proven.

    Raises:
        InvalidConstraints: the policy's constraints cannot be met on `profile`.
    """
    rules, graph = policy.constraints, _graph_of(policy, profile)
    position = {key: OpId(i) for i, key in enumerate(profile.keys())}
    groups = {
        position[key]: tuple(position[name] for name in latest)
        for key, latest in policy.use_groups.items()
        if key in position and all(name in position for name in latest)
    }
    graph = with_use_groups(graph, groups)
    moves = _moves_of(policy, graph)
    rates = profile.link
    link = Link(math.inf, math.inf, 0.0, 0) if rates is None else Link.of(rates, 0)
    saved = frozenset(
        op.id for op in graph.ops if op.name in position and policy.decisions.get(op.name, SAVE) == SAVE
    )
    known = policy.stopped in {stopped.value for stopped in Stopped}
    stopped = Stopped(policy.stopped) if known else Stopped.TIME_LIMIT
    problem = SearchProblem(graph, Options(use_groups=False))  # the graph has those of the policy
    plan = plan_of(problem, profile, policy.budget_bytes, saved, stopped=stopped, constraints=rules)
    if moves:
        with_them = with_moves(graph, moves, link)
        save_set = with_forced_saves(with_them, saved)
        times = timing(with_them, save_set, moves, link)
        plan = moving(plan, graph, with_them, save_set, moves, times)
    return replace(plan, bound_us=0.0)


def _graph_of(policy: Policy, profile: Profile) -> Graph:
    """Return the graph of a step that `policy` is carried out in, perhaps on a stage of a pipeline.

    The static bytes that a policy states tell a stage that holds one microbatch, whose gradients count as
    static, from a step of its own; and they have what else is on a stage's device.
    """
    rules, n = policy.constraints or Constraints(), policy.predicted.microbatches
    stated = policy.predicted.static_bytes
    alone = constrained(profile, rules)
    if n == 1 + profile.waiting_microbatches and stated == alone.static_bytes:
        return alone
    stated -= rules.extra_static_bytes
    stage = stage_graph(profile, n)
    if n == 1 and stated != stage.static_bytes:
        return alone
    if policy.profile_digest == profile.digest:
        stage = stage_graph(profile, n, beside_bytes=max(0, stated - stage.static_bytes))
    return constrained(stage, rules.model_copy(update={"gradients": "as profiled"}))


def _moves_of(policy: Policy, graph: Graph) -> tuple[Move, ...]:
    """Return the moves of `policy`; those of ops that `graph` does not have are left out."""
    op_of = {op.name: op.id for op in graph.ops}
    step_of = {graph.ops[op].name: step for step, op in triggers(graph).items()}
    return tuple(
        Move(op, Moment(op_of.get(points.free, graph.forward_end(op))), step_of[points.fetch])
        for key, points in policy.moves.items()
        if points.fetch in step_of and (op := op_of.get(key)) is not None
    )


def _most_at(timeline: Timeline, moment: int) -> int:
    return max((i.live_bytes for i in timeline.instants if i.moment == moment), default=0)


# --- in words -------------------------------------------------------------------------------------------


def why_in_words(answer: Why) -> str:
    """Write the answer as text."""
    if answer.fate is Decision.UNUSED:
        return f"{answer.key} is neither saved nor recomputed: backward does not need it."
    saved = answer.fate is Decision.SAVED
    moved = "moved to the host and back" if answer.fate is Decision.MOVED else "recomputed in backward"
    lines = [f"{answer.key} is {'saved' if saved else moved}."]
    if answer.must_save and saved:
        return f"{lines[0]} It must be saved: {answer.must_save}."
    if answer.must_recompute and not saved:
        lines.append("Its pin requires that; the planner had no choice.")
    spent = format_us(abs(answer.gain_us))
    sign = "less" if answer.gain_us >= 0 else "more"
    lines.append(
        f"With it {'recomputed' if saved else 'saved'}, backward would recompute {spent} {sign}"
        f" ({format_us(answer.recompute_us)} in all)."
    )
    where = f"At the planned peak, {answer.planned_peak_at}"
    change = answer.at_peak_bytes
    lines.append(
        f"{where}, {format_bytes(abs(change))} {'more' if change > 0 else 'less'} would be live."
        if change
        else f"{where}, the live bytes would not change."
    )
    over = answer.peak - answer.budget
    verdict = (
        f"{format_bytes(over)} over the budget of {format_bytes(answer.budget)}"
        if over > 0
        else f"within the budget of {format_bytes(answer.budget)}"
    )
    lines.append(
        f"The peak would be {format_bytes(answer.peak)} (planned: {format_bytes(answer.planned_peak)}), at"
        f" {answer.peak_at}: {verdict}."
    )
    if answer.forward_over:
        lines.append(f"Forward would exceed its own budget by {format_bytes(answer.forward_over)}.")
    if answer.follows and not saved:
        lines.append(f"Saving {answer.follows} instead is never worse, so the planner considers only that.")
    if not saved and answer.fits and answer.gain_us > 0 and not answer.must_recompute:
        lines.append(f"So it could be saved; the planner stopped within {answer.gap:.1%} of the best plan.")
    return "\n".join(lines)


def more_in_words(answer: More) -> str:
    """Write the answer as text."""
    if answer.plan is None and answer.recompute_us == 0:
        return "More memory saves no time: nothing is recomputed."
    if answer.plan is None:
        return "More memory saves no time: only ops that must be recomputed are."
    lines = [
        f"{format_bytes(answer.larger - answer.budget)} more (a budget of {format_bytes(answer.larger)}"
        f"{', the ceiling' if answer.larger >= answer.ceiling else ''}) would save"
        f" {format_us(answer.gain_us)} of recompute in each step: {format_us(answer.recompute_us_then)}"
        f" instead of {format_us(answer.recompute_us)}."
    ]
    if answer.next is not None:
        lines.append(
            f"First to save: {answer.next.key}, {format_us(answer.next.gain_us)} for"
            f" {format_bytes(answer.next.extra_bytes)} more at the peak ({answer.next.peak_at})."
        )
    return "\n".join(lines)
