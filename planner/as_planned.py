"""Carry a policy out on a profile, without solving: the plan that it is there."""

from __future__ import annotations

import math
from dataclasses import replace

from autoac.planner.errors import OtherProfile
from autoac.planner.formats.policy import SAVE, Policy
from autoac.planner.formats.profile import Profile
from autoac.planner.memory.clocks import timing
from autoac.planner.plan import Plan, moving, plan_of
from autoac.planner.problem.apply_constraints import constrained
from autoac.planner.problem.graph import Graph, Moment, OpId
from autoac.planner.problem.moves import Link, Move, triggers, with_moves
from autoac.planner.problem.passes import with_passes
from autoac.planner.problem.save_sets import with_forced_saves
from autoac.planner.problem.use_groups import with_use_groups
from autoac.planner.solver.highs import Stopped
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.variables import Options


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
    rules, waiting = policy.constraints, policy.predicted.microbatches - 1
    graph = replace(constrained(profile, rules), waiting_microbatches=waiting)
    position = {key: OpId(i) for i, key in enumerate(profile.keys())}
    groups = {
        position[key]: tuple(position[name] for name in latest)
        for key, latest in policy.use_groups.items()
        if key in position and all(name in position for name in latest)
    }
    graph = with_passes(with_use_groups(graph, groups))
    moves = _moves_of(policy, graph)
    rates = profile.link
    link = Link(math.inf, math.inf, 0.0, 0) if rates is None else Link.of(rates, 0)
    saved = frozenset(
        op.id for op in graph.ops if op.name in position and policy.decisions.get(op.name, SAVE) == SAVE
    )
    known = policy.stopped in {stopped.value for stopped in Stopped}
    stopped = Stopped(policy.stopped) if known else Stopped.TIME_LIMIT
    problem = SearchProblem(graph, Options(use_groups=False))  # the graph has those of the policy
    budget = policy.budget_bytes - rules.headroom_bytes
    plan = plan_of(problem, profile, budget, saved, stopped=stopped, constraints=rules)
    if moves:
        with_them = with_moves(graph, moves, link)
        save_set = with_forced_saves(with_them, saved)
        times = timing(with_them, save_set, moves, link)
        plan = moving(plan, graph, with_them, save_set, moves, times)
    return replace(plan, bound_us=0.0)


def _moves_of(policy: Policy, graph: Graph) -> tuple[Move, ...]:
    """Return the moves of `policy`; those of ops that `graph` does not have are left out."""
    op_of = {op.name: op.id for op in graph.ops}
    step_of = {graph.ops[op].name: step for step, op in triggers(graph).items()}
    return tuple(
        Move(op, Moment(op_of.get(points.free, graph.forward_end(op))), step_of[points.fetch])
        for key, points in policy.moves.items()
        if points.fetch in step_of and (op := op_of.get(key)) is not None
    )
