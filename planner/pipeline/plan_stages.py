"""Plan the stages of a pipeline: a stage holds several microbatches, and the slowest stage decides.

NOTE [ Other microbatches ]

While a stage works on one microbatch, the n - 1 others in flight wait between their forward and their
backward. Each holds what the save set keeps past forward, so these bytes count n times:
`Graph.waiting_microbatches` is n - 1, which the simulator and the rows of the program read. In every
schedule, a backward follows directly on the forward that brings the stage to n microbatches. So both run
while n - 1 others wait. The largest peak of the stage is therefore the simulated peak of one microbatch while
n - 1 wait.

Where backward is split, others wait for their weight half, with bytes that no plan changes. Which moment is
the fullest then depends on the plan. That with the most microbatches is planned for; if the plan does not fit
at another one, the most that wait for either half are, as if they did at once.

What a microbatch moves to the host has left the device where its forward ends, so those that wait hold
nothing of it there; the host holds it n times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

from autoac.planner.budget import one_budget
from autoac.planner.errors import InfeasibleBudget, InvalidConstraints, InvalidPipeline
from autoac.planner.formats.constraints import Constraints
from autoac.planner.formats.profile import Profile
from autoac.planner.memory.simulate import fits
from autoac.planner.offload import plan_with_host
from autoac.planner.pipeline.schedules import Cost, PipelineTimes, Schedule, WorkKind, stage_loads, times
from autoac.planner.plan import Plan
from autoac.planner.problem.graph import Graph
from autoac.planner.problem.stage import stage_graph
from autoac.planner.solver.highs import OnProgress
from autoac.planner.solver.time_limit import Clock

WEIGHT_SHARE = 0.5  # of backward's time: the weight half, where a schedule splits backward


class PlanOptions(TypedDict, total=False):
    """Options that go to `plan` as they are."""

    headroom_bytes: int
    gap: float
    step_gap: float | None
    work_limit: float
    time_limit_s: float
    clock: Clock | None
    progress: OnProgress | None


@dataclass(frozen=True, slots=True)
class Stage:
    """The plan of one pipeline stage, with the memory and the time that it takes in the pipeline."""

    in_flight: int  # microbatches of one chunk's size, the one at work included
    waiting_bytes: int  # of microbatches that wait for their weight half; not in the plan
    plan: Plan
    cost: Cost  # of one microbatch of one chunk, with what the plan recomputes, and waits for moves


@dataclass(frozen=True, slots=True)
class Stages:
    """A planned pipeline. The stage of `times.bottleneck` decides how long a step takes."""

    schedule: Schedule
    n_microbatches: int
    stages: tuple[Stage, ...]
    times: PipelineTimes  # with what the plans recompute
    plain: PipelineTimes  # with nothing recomputed

    @property
    def slowdown(self) -> float:
        """Return the extra time of a step as a fraction of the step with nothing recomputed."""
        return self.times.step_us / self.plain.step_us - 1 if self.plain.step_us > 0 else 0.0


def plan_stage(
    profile: Profile | Graph,
    *,
    in_flight: int,
    budget_gb: float | None = None,
    budget_bytes: int | None = None,
    beside_bytes: int = 0,
    constraints: Constraints | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Plan a stage that holds `in_flight` microbatches at its fullest, as `plan` does.

    Args:
        profile: one microbatch's step on the stage, or the Graph of one (whose own batch is not known).
        in_flight: the microbatch at work and those that wait: see `schedules.in_flight`.
        beside_bytes: other bytes on the device, such as the parameters of the stage's other chunks.
        constraints: as for `plan_with_host`, except that the gradients of a stage exist for all microbatches
            but the first, as `stage_graph` has it. Outputs move only with the link of a Profile.
        budget_gb, budget_bytes, options: as for `plan`.

    Raises:
        InvalidPipeline: fewer than one microbatch, or negative bytes.
        InvalidConstraints: gradients="absent", or as `plan`.
        InvalidBudget, InvalidLimit, InfeasibleBudget, SolverOutOfTime: as `plan`.
    """
    for_plan = constraints
    if for_plan is not None and for_plan.gradients != "as profiled":
        if for_plan.gradients == "absent":
            raise InvalidConstraints(
                "gradients must not be 'absent' in a pipeline, whose microbatches add to the same gradients; "
                "leave it out"
            )
        for_plan = for_plan.model_copy(update={"gradients": "as profiled"})
    stage_plan = plan_with_host(
        stage_graph(profile, in_flight, beside_bytes=beside_bytes),
        budget_bytes=one_budget(budget_gb, budget_bytes),
        rates=profile.link if isinstance(profile, Profile) else None,
        constraints=for_plan,
        **options,
    )
    recorded = None if constraints == Constraints() else constraints
    return replace(stage_plan, profile=None if isinstance(profile, Graph) else profile, constraints=recorded)


def plan_stages(
    profiles: Sequence[Profile | Graph],
    schedule: Schedule | str,
    *,
    n_microbatches: int,
    budget_gb: float | Sequence[float],
    chunks: int | None = None,
    weight_half_bytes: Sequence[int] | None = None,
    constraints: Constraints | Sequence[Constraints | None] | None = None,
    **options: Unpack[PlanOptions],
) -> Stages:
    """Plan each stage within its device's budget, and replay the time of a step.

    Args:
        profiles: for each stage, the step of one microbatch on one of its chunks; the stage's other
            chunks are taken to be alike.
        schedule: a Schedule, or its name.
        n_microbatches: in one step.
        budget_gb: GiB for each device, or one number for all.
        chunks: of the model for each stage.
        weight_half_bytes: by stage, the bytes that a microbatch holds between the input half and the weight
            half of its backward, if the schedule splits backward. By default it counts like any other
            microbatch in flight. That is too little if the runtime keeps recomputed values for the weight
            half. Must be given where saved tensors may move to the host.
        constraints: as for `plan_stage`: one for each stage, or one for all. The patterns of one for all
            must match in every stage.
        options: as for `plan`, for each stage by itself.

    Raises:
        InvalidPipeline: as `schedules.in_flight`; or a list has not one entry for each stage;
            or `weight_half_bytes` is missing.
        InvalidConstraints, InfeasibleBudget: as `plan_stage`; a note says for which stage.
    """
    p = len(profiles)
    budgets = [budget_gb] * p if isinstance(budget_gb, (int, float)) else list(budget_gb)
    rules = (
        [constraints] * p
        if constraints is None or isinstance(constraints, Constraints)
        else list(constraints)
    )
    lists = {"budget_gb": budgets, "weight_half_bytes": weight_half_bytes, "constraints": rules}
    for name, entries in lists.items():
        if entries is not None and len(entries) != p:
            raise InvalidPipeline(
                f"{name} must have one entry for each of the {p} stages, got {len(entries)}"
            )
    stages = []
    plain = []
    n_chunks = 1
    for s, profile in enumerate(profiles):
        loads = stage_loads(schedule, s, p, n_microbatches, chunks=chunks)
        n_chunks = len(loads[0].backward)
        is_split = any(load.action.kind is WorkKind.WEIGHT for load in loads)
        fills, half_bytes = [_Fill(max(load.total for load in loads), 0)], 0
        if weight_half_bytes is not None and is_split:
            at_work = (load for load in loads if load.action.kind is not WorkKind.WEIGHT)
            fills = [_Fill(sum(load.backward), sum(load.weights)) for load in at_work]
            half_bytes = weight_half_bytes[s]
        if is_split and weight_half_bytes is None and (own := rules[s]) is not None and own.host_budget_bytes:
            raise InvalidPipeline(
                f"weight_half_bytes must be given for {schedule} with a host's budget, got None: between its "
                "halves a microbatch has fetched what it moved"
            )
        try:
            fill, stage_plan = _plan_fullest(
                profile,
                fills,
                half_bytes,
                budget_gb=budgets[s],
                beside_bytes=(n_chunks - 1) * _chunk_bytes(profile),
                constraints=rules[s],
                **options,
            )
        except (InfeasibleBudget, InvalidConstraints) as error:
            most = max(fill.backward + fill.weights for fill in fills)
            error.add_note(f"This is stage {s} of {p}, which holds {most} microbatches under {schedule}.")
            raise
        cost = _cost(stage_plan.graph, stage_plan.extra_us)
        stages.append(Stage(fill.backward, fill.weights * half_bytes, stage_plan, cost))
        plain.append(_cost(stage_plan.graph, 0.0))
    return Stages(
        schedule=Schedule(schedule),
        n_microbatches=n_microbatches,
        stages=tuple(stages),
        times=times(schedule, [[stage.cost] * n_chunks for stage in stages], n_microbatches),
        plain=times(schedule, [[cost] * n_chunks for cost in plain], n_microbatches),
    )


@dataclass(frozen=True, slots=True)
class _Fill:
    """Count the microbatches in flight at one moment."""

    backward: int  # whose backward has not ended, the one at work included
    weights: int  # that wait for their weight half


def _plan_fullest(
    profile: Profile | Graph,
    fills: Sequence[_Fill],
    half_bytes: int,
    *,
    beside_bytes: int,
    **rest: Any,
) -> tuple[_Fill, Plan]:
    """Return a plan that fits at each of `fills`, and the one that it was made for.

    Args:
        profile: as for `plan_stage`.
        fills: of the moments at which a microbatch is at work.
        half_bytes: what a microbatch holds that waits for its weight half.
        beside_bytes, rest: as for `plan_stage`.
    """
    inputs = profile.static.inputs if isinstance(profile, Profile) else 0
    fullest = max(fills, key=lambda fill: (fill.backward + fill.weights, fill.backward))
    most_of_both = _Fill(
        fullest.backward, max(fill.weights for fill in fills)
    )  # most wait for backward there
    for made_for in (fullest, most_of_both):
        found = plan_stage(
            profile,
            in_flight=made_for.backward,
            beside_bytes=beside_bytes + made_for.weights * half_bytes,
            **rest,
        )
        steps = [
            replace(
                found.graph,
                waiting_microbatches=fill.backward - 1,
                static_bytes=found.graph.static_bytes
                + (fill.backward - made_for.backward) * inputs
                + (fill.weights - made_for.weights) * half_bytes,
            )
            for fill in set(fills) - {made_for}
        ]
        if all(fits(step, found.save_set, found.budget) for step in steps):
            break
    return made_for, found


def _chunk_bytes(profile: Profile | Graph) -> int:
    """Return what another chunk always holds: parameters, buffers, gradients, optimizer state."""
    if isinstance(profile, Graph):
        return profile.static_bytes
    return profile.static.total - profile.static.inputs + profile.gradient_nbytes


def _cost(graph: Graph, extra_us: float) -> Cost:
    """Return the cost of a microbatch; extra time counts in the input half of backward, which comes first."""
    backward = sum(step.runtime_us for step in graph.steps)
    return Cost(
        forward_us=sum(op.runtime_us for op in graph.ops),
        input_us=backward * (1 - WEIGHT_SHARE) + extra_us,
        weight_us=backward * WEIGHT_SHARE,
    )
