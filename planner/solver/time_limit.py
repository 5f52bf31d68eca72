"""Limit a search: units of work, seconds, and a callback that can stop it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autoac.planner.errors import InvalidLimit
from autoac.planner.solver.highs import (
    Floats,
    OnProgress,
    Outcome,
    Program,
    Progress,
    Stopped,
    solve,
)

Clock = Callable[[], float]
"""A function that returns seconds, such as `time.monotonic`. The planner itself reads no clock."""


def check_limits(gap: float, time_limit_s: float, work_limit: float = 0.0) -> None:
    """Refuse limits that no search can keep; NaN would never end one.

    Raises:
        InvalidLimit: `gap` is not from 0 to 1, or another limit is negative or NaN.
    """
    if not 0 <= gap <= 1:
        raise InvalidLimit("gap", gap, "from 0 to 1")
    if not time_limit_s >= 0:
        raise InvalidLimit("time_limit_s", time_limit_s, "at least 0 seconds")
    if not work_limit >= 0:
        raise InvalidLimit("work_limit", work_limit, "at least 0 units of work")


HEURISTICS_OFF = {"mip_heuristic_run_rins": False, "mip_heuristic_run_rens": False}


class Stopwatch:
    """Count the seconds since a search began: on the caller's clock, or else the solver's own."""

    def __init__(self, time_limit_s: float, clock: Clock | None = None) -> None:
        self.limit_s, self._clock = time_limit_s, clock
        self._began = clock() if clock is not None else 0.0
        self.solver_s = 0.0  # seconds of the solver's own clock

    @property
    def left_s(self) -> float:
        """Return the seconds that are left; negative if it took too long."""
        spent = self.solver_s if self._clock is None else self._clock() - self._began
        return self.limit_s - spent


class Allowance:
    """Solve one program after another until the work or the time is used up, or `progress` stops it.

    By default the work alone limits a search: the same input then gives the same plan on every machine. If
    a caller limits the seconds too, `stopped` says if they ended the search.
    """

    def __init__(self, work_limit: float, stopwatch: Stopwatch, progress: OnProgress | None) -> None:
        self.work_left = work_limit
        self.interrupted = self.out_of_time = False
        self._stopwatch, self._progress = stopwatch, progress
        self._latest = Progress(math.inf, -math.inf, math.inf, 0.0)

    def with_work(self, work_limit: float) -> Allowance:
        """Return an allowance of `work_limit` for another search, which shares the time that is left."""
        return Allowance(work_limit, self._stopwatch, self._progress)

    def with_work_up_to(self, most: float) -> Allowance:
        """Return an allowance for another search of `most` units of work, or of what is left if less."""
        return self.with_work(min(most, max(self.work_left, 0.0)))

    @property
    def time_limit_s(self) -> float:
        """Return the seconds that all searches on this stopwatch have together."""
        return self._stopwatch.limit_s

    @property
    def _left_s(self) -> float:
        return max(self._stopwatch.left_s, 0.0)

    @property
    def over(self) -> bool:
        """Return True if nothing more may be solved."""
        self.out_of_time |= self._left_s <= 0
        return self.interrupted or self.out_of_time or self.out_of_work

    @property
    def out_of_work(self) -> bool:
        """Return True once the work is used up."""
        return self.work_left <= 0

    @property
    def solver_s(self) -> float:
        """Return the seconds of the solver's own clock, over all searches on this stopwatch."""
        return self._stopwatch.solver_s

    @property
    def stopped(self) -> Stopped:
        """Return why a search stopped before its end."""
        if self.interrupted:
            return Stopped.INTERRUPTED
        return Stopped.TIME_LIMIT if self.out_of_time else Stopped.WORK_LIMIT

    def solve(
        self,
        program: Program,
        *,
        gap: float = 0.0,
        target: float | None = None,
        relaxed: bool = False,
        relaxed_work: float = 0.0,
        start: Floats | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """Solve `program` as `highs.solve` does."""
        outcome = solve(
            program,
            time_limit_s=self._left_s,
            work_limit=max(self.work_left, 0.0),
            gap=gap,
            target=target,
            start=start,
            relaxed=relaxed,
            relaxed_work=relaxed_work,
            progress=self._is_stopped,
            options=HEURISTICS_OFF | dict(options or {}),
        )
        self._count(outcome)
        return outcome

    def _count(self, outcome: Outcome) -> None:
        self._stopwatch.solver_s += outcome.seconds
        self.work_left -= outcome.work
        self.interrupted |= outcome.stopped is Stopped.INTERRUPTED
        self.out_of_time |= outcome.stopped is Stopped.TIME_LIMIT

    def spend(self, work: float) -> bool:
        """Count work that is not the solver's; return False if nothing more may be spent."""
        self.work_left -= work
        self.interrupted |= self._is_stopped()
        return not self.over

    def report(self, best: float | None, bound: float) -> None:
        """Call `progress` with the best cost so far and the proven bound."""
        primal, gap = (math.inf, math.inf) if best is None else (best, relative_gap(best, bound))
        self._latest = Progress(primal, bound, gap, 0.0)
        self.interrupted |= self._is_stopped()

    def _is_stopped(self, seconds: float = 0.0) -> bool:
        """Call `progress` with the last report, `seconds` into a solve; return True if it says to stop."""
        if self._progress is None:
            return False
        return bool(self._progress(replace(self._latest, seconds=self._stopwatch.solver_s + seconds)))


def relative_gap(best: float, bound: float) -> float:
    """Return (best - bound) / best, at least 0."""
    return max(0.0, (best - bound) / best) if best > 0 else 0.0
