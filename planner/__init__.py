"""Profile + budget -> Plan -> Policy. Pure: values in, values out; imports no torch."""

from autoac.planner.bounds import Bounds, bounds
from autoac.planner.constraints import Constraints, constrained
from autoac.planner.difference import Difference, difference, difference_in_words
from autoac.planner.errors import (
    ConflictingPins,
    InfeasibleBudget,
    InfeasibleConstraints,
    InvalidBudget,
    InvalidConstraints,
    InvalidLimit,
    InvalidPipeline,
    MalformedPolicy,
    MalformedProfile,
    OtherProfile,
    PlannerError,
    SolverOutOfTime,
    UnknownKey,
    UnknownOp,
    UnknownVersion,
    UnmatchedPattern,
)
from autoac.planner.explain import explain
from autoac.planner.floor import Floor, floor
from autoac.planner.frontier import Frontier, frontier, frontier_in_words
from autoac.planner.graph import Graph, build
from autoac.planner.highs import Progress, Stopped
from autoac.planner.picture import Picture, picture
from autoac.planner.plan import Plan, plan
from autoac.planner.policy import Policy
from autoac.planner.policy_set import PolicySet
from autoac.planner.profile import Profile
from autoac.planner.schedule import schedule
from autoac.planner.simulate import Timeline, simulate
from autoac.planner.stages import Stage, Stages, plan_stage, plan_stages
from autoac.planner.whatif import More, Why, as_planned, carried, more, more_in_words, why, why_in_words

__all__ = [
    "Bounds",
    "ConflictingPins",
    "Constraints",
    "Difference",
    "Floor",
    "Frontier",
    "Graph",
    "InfeasibleBudget",
    "InfeasibleConstraints",
    "InvalidBudget",
    "InvalidConstraints",
    "InvalidLimit",
    "InvalidPipeline",
    "MalformedPolicy",
    "MalformedProfile",
    "More",
    "OtherProfile",
    "Picture",
    "Plan",
    "PlannerError",
    "Policy",
    "PolicySet",
    "Profile",
    "Progress",
    "SolverOutOfTime",
    "Stage",
    "Stages",
    "Stopped",
    "Timeline",
    "UnknownKey",
    "UnknownOp",
    "UnknownVersion",
    "UnmatchedPattern",
    "Why",
    "as_planned",
    "bounds",
    "build",
    "carried",
    "constrained",
    "difference",
    "difference_in_words",
    "explain",
    "floor",
    "frontier",
    "frontier_in_words",
    "more",
    "more_in_words",
    "picture",
    "plan",
    "plan_stage",
    "plan_stages",
    "schedule",
    "simulate",
    "why",
    "why_in_words",
]
