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
    RankMissing,
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
)
from .fit import Fit, FitRow, fit
from .layouts import LayoutRow, compare_layouts, layouts_of
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
    "LayoutRow",
    "LeftThePath",
    "NotApplied",
    "Pin",
    "PinConflict",
    "PolicyConflict",
    "PolicySet",
    "RankFailed",
    "RankMissing",
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
    "compare_layouts",
    "fit",
    "layouts_of",
    "pin",
    "save_recompute_policy",
    "split_backward",
]
