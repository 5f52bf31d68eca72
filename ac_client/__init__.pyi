from .applied_model import Applied, applied
from .apply import Constraints, PolicySet, apply
from .errors import (
    AlreadyApplied,
    ApplyError,
    CheckpointingActive,
    CompiledModel,
    InfeasibleBudget,
    InvalidBudget,
    InvalidConstraints,
    NotApplied,
    PinConflict,
    RankFailed,
    ShapeNotPlanned,
    SolverOutOfTime,
)
from .fit import Fit, FitRow, fit
from .measure.report import Report
from .pins import Pin, pin
from .runtime.checkpoint import checkpoint, checkpoint_sequential
from .runtime.cursor import LeftThePath
from .runtime.nested_policies import PolicyConflict
from .runtime.policy_context import save_recompute_policy, tag
from .runtime.split_backward import split_backward
from .runtime.write_guard import ContentsDiffer, StaleError
from .service_client.errors import RemoteError, ServiceRefused, ServiceUnavailable

__all__ = [
    "AlreadyApplied",
    "Applied",
    "ApplyError",
    "CheckpointingActive",
    "CompiledModel",
    "Constraints",
    "ContentsDiffer",
    "Fit",
    "FitRow",
    "InfeasibleBudget",
    "InvalidBudget",
    "InvalidConstraints",
    "LeftThePath",
    "NotApplied",
    "Pin",
    "PinConflict",
    "PolicyConflict",
    "PolicySet",
    "RankFailed",
    "RemoteError",
    "Report",
    "ServiceRefused",
    "ServiceUnavailable",
    "ShapeNotPlanned",
    "SolverOutOfTime",
    "StaleError",
    "applied",
    "apply",
    "checkpoint",
    "checkpoint_sequential",
    "fit",
    "pin",
    "save_recompute_policy",
    "split_backward",
    "tag",
]
