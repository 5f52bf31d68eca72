"""What a search may use up: the solver's time, and a user's patience."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autoac.planner.errors import InvalidLimit
from autoac.planner.highs import Floats, OnProgress, Outcome, Program, Progress, Stopped, solve


def check_limits(gap: float, time_limit_s: float) -> None:
    """Refuse what no search can keep to; NaN would never end one.

    Raises:
        InvalidLimit: `gap` is not from 0 to 1, or `time_limit_s` is negative or NaN.
    """
    if not 0 <= gap <= 1:
        raise InvalidLimit("gap", gap, "from 0 to 1")
    if not time_limit_s >= 0:
        raise InvalidLimit("time_limit_s", time_limit_s, "at least 0 seconds")


HEURISTICS_OFF = {"mip_heuristic_run_rins": False, "mip_heuristic_run_rens": False}


class Allowance:
    """Solves one program after another within a time limit, until `progress` says stop.

    `left` and `spent` are seconds of the solver's own clock.
    """

    def __init__(self, time_limit_s: float, progress: OnProgress | None) -> None:
        self.left, self.spent = time_limit_s, 0.0
        self.interrupted = False
        self._progress = progress

    @property
    def over(self) -> bool:
        """Whether nothing more may be solved."""
        return self.interrupted or self.left <= 0

    def solve(
        self,
        program: Program,
        scale: float,
        *,
        gap: float = 0.0,
        target: float | None = None,
        relaxed: bool = False,
        start: Floats | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """As `highs.solve`. Progress is told in the units of the objective times `scale`."""
        outcome = solve(
            program,
            time_limit_s=self.left,
            gap=gap,
            target=target,
            start=start,
            relaxed=relaxed,
            progress=self._scaled(scale),
            options=HEURISTICS_OFF | dict(options or {}),
        )
        self.left -= outcome.seconds
        self.spent += outcome.seconds
        self.interrupted |= outcome.stopped is Stopped.INTERRUPTED
        return outcome

    def tell(self, best: float | None, bound: float) -> None:
        """Say how far the search is: the best so far, and what is proven."""
        if self._progress is not None:
            primal = math.inf if best is None else best
            gap = math.inf if best is None else relative_gap(best, bound)
            self.interrupted |= bool(self._progress(Progress(primal, bound, gap, self.spent)))

    def _scaled(self, scale: float) -> OnProgress | None:
        if self._progress is None:
            return None
        told = self._progress
        return lambda now: told(Progress(now.primal * scale, now.dual * scale, now.gap, now.seconds))


def relative_gap(best: float, bound: float) -> float:
    """(best - bound) / best, at least 0."""
    return max(0.0, (best - bound) / best) if best > 0 else 0.0
