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
from .executor import (
    ContentsDiffer,
    LeftThePath,
    PolicyConflict,
    StaleError,
    checkpoint,
    checkpoint_sequential,
    save_recompute_policy,
    split_backward,
    tag,
)
from .fit import Fit, FitRow, fit
from .measure.report import Report
from .pins import Pin, pin
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
