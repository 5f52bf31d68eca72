from .as_planned import as_planned, carried
from .errors import (
    ConflictingPins,
    InfeasibleBudget,
    InvalidBudget,
    InvalidConstraints,
    InvalidLimit,
    MalformedPolicy,
    MalformedProfile,
    OtherProfile,
    PlannerError,
    SolverOutOfTime,
    UnknownOp,
    UnknownVersion,
    UnmatchedPattern,
)
from .formats.constraints import Constraints
from .formats.policy import Policy
from .formats.policy_set import PolicySet
from .formats.profile import Profile
from .frontier import Frontier, find_frontier, frontier_in_words
from .memory.schedule import schedule
from .memory.simulate import Timeline, simulate
from .minimum_peak import MinimumPeak, find_minimum_peak
from .offload import plan_offload, plan_with_host
from .plan import Plan, plan
from .problem.apply_constraints import constrained
from .problem.build import build
from .problem.graph import Graph
from .report.policy_diff import DiffRow, diff_as_table, diff_rows
from .report.summary import beyond_dispatch_in_words, explain
from .report.timeline import Picture, picture
from .sizes.profile_by_size import ProfileBySize
from .solver.bounds import Bounds, bounds
from .solver.highs import Progress, Stopped

__all__ = [
    "Bounds",
    "ConflictingPins",
    "Constraints",
    "DiffRow",
    "Frontier",
    "Graph",
    "InfeasibleBudget",
    "InvalidBudget",
    "InvalidConstraints",
    "InvalidLimit",
    "MalformedPolicy",
    "MalformedProfile",
    "MinimumPeak",
    "OtherProfile",
    "Picture",
    "Plan",
    "PlannerError",
    "Policy",
    "PolicySet",
    "Profile",
    "ProfileBySize",
    "Progress",
    "SolverOutOfTime",
    "Stopped",
    "Timeline",
    "UnknownOp",
    "UnknownVersion",
    "UnmatchedPattern",
    "as_planned",
    "beyond_dispatch_in_words",
    "bounds",
    "build",
    "carried",
    "constrained",
    "diff_as_table",
    "diff_rows",
    "explain",
    "find_frontier",
    "find_minimum_peak",
    "frontier_in_words",
    "picture",
    "plan",
    "plan_offload",
    "plan_with_host",
    "schedule",
    "simulate",
]
