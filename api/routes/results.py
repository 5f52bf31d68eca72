"""The JSON that child processes write: results of solves, and differences. Bytes and microseconds."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, RootModel

from autoac.planner.formats.policy import Policy
from autoac.planner.report.policy_diff import DiffRow


class _Result(BaseModel):
    version: Literal[1]
    model: str
    fingerprint: str
    profile_digest: str
    device: str


class FloorView(_Result):
    """The result of a floor request: the minimum peak."""

    format: Literal["autoac.floor"]
    proven_bytes: int  # no plan has a smaller peak
    found_bytes: int  # a plan has this one
    stopped: str


class FloorOf(BaseModel):
    """The minimum peak, in a frontier."""

    proven_bytes: int
    found_bytes: int


class FrontierPoint(BaseModel):
    """One plan of a frontier: a budget, and the peak and recompute time of the plan for it."""

    budget_bytes: int
    peak_bytes: int
    recompute_us: float
    bound_us: float  # proven: no plan within the budget recomputes less
    step_us: float
    gap: float
    stopped: str
    kink: bool  # below this peak, less memory costs much more time


class FrontierView(_Result):
    """Plans in order of their peaks."""

    format: Literal["autoac.frontier"]
    floor: FloorOf
    plans: list[FrontierPoint]


class JobResult(RootModel[Policy | FrontierView | FloorView]):
    """The result of a finished job: a policy, a frontier or a minimum peak, by the kind of the job."""


class DifferenceView(BaseModel):
    """Compares two policies: what they decide otherwise."""

    held: bool  # bytes and times are known; else a profile was deleted, and unused ops count as saved
    rows: list[DiffRow]
