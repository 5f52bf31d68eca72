"""Results of a run of `autoac regenerate`, for each policy and for the whole file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ac_client.regenerate.step_changes import ChangedLayer
from autoac.planner import Difference, Plan, Policy


class Verdict(StrEnum):
    """Results that a run of `autoac regenerate` can have for one policy."""

    UNCHANGED = "unchanged"
    DRIFTED = "drifted"  # found by a check, which writes nothing
    WRITTEN = "written"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """Peak and times of a step under a policy."""

    peak_bytes: int
    recompute_us: float
    step_us: float  # with nothing recomputed

    @classmethod
    def predicted(cls, policy: Policy) -> StepNumbers:
        """Return the peak and times that are written in the file of `policy`."""
        predicted = policy.predicted
        return cls(predicted.peak_bytes, predicted.recompute_us, predicted.step_us)

    @classmethod
    def of(cls, plan: Plan) -> StepNumbers:
        """Return the peak and times of `plan`, which was just made."""
        return cls(plan.peak, plan.recompute_us, plan.step_us)


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The verdict on one policy of one model, with its reasons and numbers."""

    model: str  # its name in autoac.toml
    file: Path
    budget_gb: float
    limit_bytes: int  # the budget less the headroom
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    layers: tuple[ChangedLayer, ...] = ()  # of the model
    stored: StepNumbers | None = None  # predicted by the policy in the folder
    carried: StepNumbers | None = None  # the same policy on the model as it is now
    planned: StepNumbers | None = None  # a new plan on the model as it is now
    difference: Difference | None = None  # from the stored policy to the new one
    notes: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class RegenerateOutcome:
    """The results of one run of `autoac regenerate`, for all policies of autoac.toml."""

    config: Path
    folder: Path
    check: bool
    results: tuple[PolicyResult, ...]
    stale: tuple[Path, ...]  # files of models or budgets that the config does not list any more
    prune: bool  # whether the run removes stale files

    @property
    def drifted(self) -> bool:
        """Return True if a check found something that the same run without `check` would change."""
        return self.check and self.out_of_date

    @property
    def out_of_date(self) -> bool:
        """Return True if the folder differed from what the run writes."""
        fine = (Verdict.UNCHANGED, Verdict.FAILED)
        changed = any(result.verdict not in fine for result in self.results)
        return changed or (self.prune and bool(self.stale))

    @property
    def failed(self) -> bool:
        """Return True if a model could not be profiled or planned."""
        return any(result.verdict is Verdict.FAILED for result in self.results)
