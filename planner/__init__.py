"""Profile + budget -> Plan -> Policy. Pure: values in, values out; imports no torch."""

from autoac.planner.bounds import Bounds, bounds
from autoac.planner.errors import (
    InfeasibleBudget,
    InvalidBudget,
    MalformedPolicy,
    MalformedProfile,
    PlannerError,
    SolverOutOfTime,
    UnknownOp,
    UnknownVersion,
)
from autoac.planner.explain import explain
from autoac.planner.graph import Graph, build
from autoac.planner.highs import Progress, Stopped
from autoac.planner.plan import Floor, Plan, floor, plan
from autoac.planner.policy import Policy
from autoac.planner.profile import Profile
from autoac.planner.schedule import schedule
from autoac.planner.simulate import Timeline, simulate

__all__ = [
    "Bounds",
    "Floor",
    "Graph",
    "InfeasibleBudget",
    "InvalidBudget",
    "MalformedPolicy",
    "MalformedProfile",
    "Plan",
    "PlannerError",
    "Policy",
    "Profile",
    "Progress",
    "SolverOutOfTime",
    "Stopped",
    "Timeline",
    "UnknownOp",
    "UnknownVersion",
    "bounds",
    "build",
    "explain",
    "floor",
    "plan",
    "schedule",
    "simulate",
]
