"""Find which sizes fit a memory budget: the largest, and the fastest. `fit` is the entry.

By the datasheet of a device nothing runs: profiles are fake (profiled_sizes.py). Without one, the steps of
some sizes run for real, and a size whose step ran out of memory counts as one that does not fit. Which of the
few fastest by their profiles is the fastest is then measured: planned steps in turns (timed_sizes.py).

A plan that fits at one size fits at every smaller one with the same ops, because no block shrinks as the size
grows. So the largest size is found by bisection. The fastest one is not: larger sizes use kernels better, but
recompute more. So the sizes from the largest with nothing recomputed up to the largest are planned, at most
`MOST_PLANS` of them, closer to each other where it is fast.

Gradients exist before a forward where several micro-batches add up, and a step takes more then. Both answers
are searched, and everything else is of one of them: the safe one, if nobody says which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import torch

from ac_client.measure.quartiles import Quartiles
from ac_client.profiled_sizes import Make, ProfiledSizes
from ac_client.timed_sizes import PlannedSize, times_in_turns
from autoac.planner import (
    Constraints,
    InfeasibleBudget,
    InvalidLimit,
    Plan,
    PolicySet,
    Profile,
    SolverOutOfTime,
    bounds,
    build,
    carried,
    plan_with_host,
)
from autoac.planner.budget import amount_in_bytes, budget_in_bytes
from autoac.planner.formats.policy_set import Bucket
from autoac.planner.plan import DEFAULT_GAP, step_time_us
from autoac.planner.problem.apply_constraints import constrained
from autoac.planner.problem.graph import Graph
from autoac.planner.units import format_bytes
from autoac.profiler import DATASHEETS, Device

Axis = Literal["batch", "tokens"]

KNOTS = (2, 3, 5)  # in multiples; a batch of 1 often has ops of its own
FOURTH_KNOT = 8  # where three show a square, or nothing exact
MOST_MULTIPLES = 1 << 20
MOST_PLANS = 12  # for the table
MOST_MICRO_BATCHES = 8
WORK_LIMIT = 5.0  # of one plan; as in `plan`, up to six times as much where no start fits
FIND_WORK = 0.2  # to find any plan of a size
LAST_WORK = 2.0  # to prove that there is none, or to find any plan of the size after the largest ...
WORTH_WORK = 0.04  # ... if it is larger by this share
BENT = 0.003  # of a step: what run times between knots may be off
STEP_GAP = 0.002  # of a step: plans are near enough to the best one
MOST_TIMED = 4  # sizes whose steps are timed in turns
MAY_BE_LESS = 0.15  # of a step: what the run times of one profile may be off


@dataclass(frozen=True, slots=True)
class FitRow:
    """The step of one size within the budget."""

    size: int
    save_all_peak_bytes: int  # with nothing recomputed
    peak_bytes: int  # of the plan
    extra_us: float  # what recomputes take, and waiting for moves
    step_us: float  # of forward and backward, these included, by the profile
    per_second: float  # samples or tokens, by the profile, with the optimizer's step
    plan: Plan = field(repr=False)
    measured: Quartiles | None = None  # samples or tokens a second, of steps in turns; None: not timed

    @property
    def share(self) -> float:
        """Return the extra time as a share of the step with nothing recomputed."""
        return self.extra_us / self.plan.step_us if self.plan.step_us else 0.0


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """A step of one size as several equal micro-batches, whose gradients add up."""

    size: int  # of the whole step
    count: int
    share: float  # of the time of a step that is not split


@dataclass(frozen=True, slots=True)
class Fit:
    """Answer which sizes fit a budget."""

    axis: Axis
    multiple: int  # sizes are multiples of this
    budget_bytes: int
    device: str  # " (estimated)" ends it where nothing ran on the device
    rows: tuple[FitRow, ...] = field(repr=False)  # by size
    largest: int
    largest_cleared: int  # if no gradients exist before a forward
    largest_accumulating: int  # if they do, as in every micro-batch but the first; 0: no plan was found
    fastest: int
    equals: tuple[int, ...]  # sizes that measurements cannot tell from the fastest
    all_saved: int  # the largest size with nothing recomputed; 0 if none
    most: int | None  # the largest size that was considered; None: there was no limit in reach
    proven_from: int | None  # this size and larger ones are proven not to fit; None: the search ended before
    split: MicroBatches | None  # of the largest size, where that is faster than its plan; None for tokens
    optimizer_us: float  # of the optimizer's step, by micro-batch; 0: there is none, or it cannot be timed
    profiled: tuple[int, ...]  # sizes that have profiles of their own; others are interpolated
    profile_of: Callable[[int], Profile] = field(repr=False)
    shapes: Mapping[int, Mapping[str, str]] = field(repr=False)  # of batches that were built, by size

    @property
    def policies(self) -> PolicySet:
        """Return the policies of the fastest and the largest size, with which training starts planned."""
        by_shape = {  # of sizes with the same shape, the largest one's keeps the budget for both
            tuple(self.shapes[size].items()): self.row(size) for size in sorted({self.fastest, self.largest})
        }
        return PolicySet(
            buckets=tuple(
                Bucket(shape=dict(self.shapes[r.size]), policy=r.plan.policy()) for r in by_shape.values()
            )
        )

    def row(self, size: int) -> FitRow:
        """Return the row of `size`, one of those planned."""
        return next(row for row in self.rows if row.size == size)

    def per_second(self, size: int) -> float:
        """Return samples or tokens a second of a size with a row: measured in turns, or by its profile."""
        row = self.row(size)
        return row.per_second if row.measured is None else row.measured.median

    def admits(self, lengths: Iterable[int]) -> bool:
        """Return True if a sequence packed from others of these lengths is within the largest size."""
        return sum(lengths) <= self.largest

    def peak_bytes(self, size: int) -> int:
        """Return the peak of a step of `size` with nothing recomputed."""
        constraints = self.row(self.largest).plan.constraints
        return bounds(constrained(self.profile_of(size), constraints)).ceiling

    def sizes_within(self, nbytes: int) -> range:
        """Return the sizes of which a step with nothing recomputed stays within `nbytes`."""
        most = _last(lambda n: self.peak_bytes(n * self.multiple) <= nbytes, 0, MOST_MULTIPLES)
        return range(self.multiple, most * self.multiple + 1, self.multiple)


def fit(
    make: Make,
    budget_gb: float,
    *,
    on: str | Device | None = None,
    axis: Axis = "batch",
    multiple: int = 1,
    most: int | None = None,
    autocast: torch.dtype | None = None,
    host_budget_gb: float = 0.0,
    accumulates: int | None = None,
) -> Fit:
    """Return the largest and the fastest size whose step fits in `budget_gb`.

    Args:
        make: size -> (model, batch), or what else the function of `autoac profile` may return. Called for
            about ten sizes; with `on`, the model and the batch may be on the meta device.
        budget_gb: GiB that the device may hold at any moment of the step.
        on: the device: a name in DATASHEETS, such as "h100", or a datasheet. None: that of the model, where
            steps run for real, and the optimizer's on a copy. Gradients, buffers and generators are put back.
        axis: what the size counts: samples of the batch, or tokens. Only for words.
        multiple: sizes are multiples of this.
        most: the largest size to consider, such as the positions that the model has.
        autocast: the type that the step is cast to.
        host_budget_gb: GiB of the host that saved tensors may be moved to.
        accumulates: how many micro-batches add their gradients up, or True if that is not known; sizes are
            those of one. False: no gradients exist before a forward. None: as `make` says, in a dict with
            "accumulates"; else the size must fit both ways, if one does.

    Raises:
        InvalidBudget: a budget is not a positive number of GiB.
        InvalidLimit: `multiple` is not from 1 to `most`.
        ValueError: `on` is not a name in DATASHEETS, or has no link for moves to the host; or all sizes take
            the same memory.
        AlreadyApplied: without `on`, the model is planned already.
        InfeasibleBudget: not even the smallest size fits.
        SolverOutOfTime: the smallest size may fit, but no plan was found.
        torch.OutOfMemoryError: without `on`, the smallest size has no room on the device.
    """
    budget = budget_in_bytes(budget_gb)
    if isinstance(on, str) and on not in DATASHEETS:
        raise ValueError(f"on must be one of {', '.join(DATASHEETS)}, or a datasheet, got {on!r}")
    if not 1 <= multiple <= (multiple if most is None else most):
        largest = "" if most is None else f" to most, which is {most}"
        raise InvalidLimit("multiple", multiple, f"from 1{largest}")
    device = DATASHEETS[on] if isinstance(on, str) else on
    host_bytes = amount_in_bytes(host_budget_gb, "host_budget_gb")
    if host_bytes and device is not None and not device.link_bytes_per_s:
        raise ValueError(
            f"on must be a device with a link to its host, got {device.name}; see host_budget_gb"
        )
    sizes = ProfiledSizes(make, device, autocast, accumulates)
    constraints = Constraints(host_budget_bytes=host_bytes)
    chosen = cleared = SizeSearch(sizes, budget, constraints, multiple, most)
    answers = cleared.largest()[0] * multiple, 0
    try:
        adding = SizeSearch(
            sizes, budget, constraints.model_copy(update={"gradients": "present"}), multiple, most
        )
        answers = answers[0], adding.largest()[0] * multiple
        chosen = cleared if sizes.accumulates == 0 else adding
    except (InfeasibleBudget, SolverOutOfTime):
        if sizes.accumulates:
            raise
    return chosen.fit(axis, answers)


class SizeSearch:
    """A search of one `fit`. Sizes are counted in multiples."""

    def __init__(
        self, sizes: ProfiledSizes, budget: int, constraints: Constraints, multiple: int, most: int | None
    ) -> None:
        self._sizes = sizes
        self._budget = budget
        self._constraints = constraints
        self._multiple = multiple
        self._most = MOST_MULTIPLES if most is None else most // multiple
        self._rows: dict[int, FitRow] = {}
        self._found: dict[int, tuple[object, bool | None]] = {}  # bytes of sizes, and if they have plans
        self._unprovable = 0.0  # more work proves nothing of sizes whose `_least` is up to this
        self._latest: Plan | None = None  # that was found where any plan would do
        self._proven: int | None = None
        self._no_room = set[int]()  # sizes that ran out of memory
        self._bent = True  # run times do not lie on a line between the knots

    def fit(self, axis: Axis, answers: tuple[int, int]) -> Fit:
        """Return everything about the sizes; `answers` are the largest ones without and with gradients."""
        largest, all_saved = self.largest()
        self._join(largest)
        fastest, equals, split = self._fastest(largest, all_saved), list[int](), None
        parts = self._parts(largest) if axis == "batch" else []
        if parts:
            count, part = parts[0]
            split = count, Quartiles.of([self._us(part, count) / self._us(self._rows[largest])])
        if self._sizes.runs:
            fastest, equals, split = self._time(largest, all_saved, parts)
        m = self._multiple
        return Fit(
            axis=axis,
            multiple=m,
            budget_bytes=self._budget,
            device=self._at(largest).environment.device_name,
            rows=tuple(self._rows[n] for n in sorted(self._rows)),
            largest=largest * m,
            largest_cleared=answers[0],
            largest_accumulating=answers[1],
            fastest=fastest * m,
            equals=tuple(n * m for n in equals),
            all_saved=all_saved * m,
            most=None if largest < self._most == MOST_MULTIPLES else self._most * m,
            proven_from=None if self._proven is None else self._proven * m,
            split=MicroBatches(largest * m, split[0], split[1].median)
            if split is not None and split[1].high < 1
            else None,
            optimizer_us=self._sizes.optimizer_us_of_batch,
            profiled=self._sizes.profiled,
            profile_of=self._sizes.at,
            shapes=self._sizes.shapes,
        )

    def _join(self, *multiples: int) -> None:
        self._sizes.join(*(n * self._multiple for n in multiples))

    def _at(self, n: int) -> Profile:
        return self._sizes.at(n * self._multiple)

    def largest(self) -> tuple[int, int]:
        """Return the largest size with a plan, and the largest with nothing recomputed, both confirmed."""
        self._join(*{min(knot, self._most) for knot in KNOTS})
        if self._sizes.joined is None or self._sizes.joined.measured_only:
            self._join(min(FOURTH_KNOT, self._most))
        self._check_growth()
        self._plan(1)  # raises if it does not fit
        while True:
            highest = self._last(lambda n: self._least(n) <= self._budget, 1, self._most)
            after = highest + 1
            self._proven = after if highest < self._most and after not in self._no_room else None
            all_saved = self._last(lambda n: bounds(self._graph(n)).ceiling <= self._budget, 0, highest)
            least = max(all_saved, 1)
            largest = self._last(self._has_plan, least, highest, (highest - least + 1) // 2)
            while largest < highest and self._last(self._has_plan_with_work, largest, largest + 1) > largest:
                largest += 1
            if not self._constraints.host_budget_bytes:
                last_open = self._last(self._may_have_plan, largest, (self._proven or after) - 1)
                largest = last_open if self._has_plan(last_open) else largest
            joined = [n for n in {all_saved, largest} - {0} if n * self._multiple not in self._sizes.profiled]
            if not joined:
                return largest, all_saved
            for n in joined:
                self._sizes.profile(n * self._multiple)

    def _check_growth(self) -> None:
        sizes = self._sizes.joined.sizes if self._sizes.joined is not None else ()
        peaks = {bounds(build(self._sizes.at(size))).ceiling for size in sizes}
        if len(sizes) > 2 and len(peaks) == 1:
            raise ValueError(
                f"make must return a larger batch for a larger size, but steps of the sizes "
                f"{', '.join(map(str, sizes))} all take {format_bytes(peaks.pop())}"
            )

    def _least(self, n: int) -> int:
        """Return bytes that no plan of the size is below; with moves to the host, those that never move."""
        if self._constraints.host_budget_bytes:
            return self._at(n).static.total
        return bounds(self._graph(n)).floor

    def _graph(self, n: int) -> Graph:
        return constrained(self._at(n), self._constraints)

    def _last(self, holds: Callable[[int], bool], low: int, high: int, width: int = 1) -> int:
        """Return the last size that holds, and for whose step the device has room; see `_last` below."""

        def holds_with_room(n: int) -> bool:
            try:
                return holds(n)
            except torch.OutOfMemoryError:
                self._no_room.add(n)
                return False

        return _last(holds_with_room, low, high, width)

    def _has_plan(self, n: int) -> bool:
        """Return True if a plan of the size is found; note from where on there is proven to be none."""
        step = self._at(n)
        needs = step.static, step.storages, step.temporaries, step.ops.other_nbytes, step.backward.peak_nbytes
        if n not in self._found or self._found[n][0] != needs:
            self._found[n] = needs, self._find_plan(n, FIND_WORK)
        has_plan = self._found[n][1]
        if has_plan is False:
            self._proven = n if self._proven is None else min(n, self._proven)
        return bool(has_plan)

    def _has_plan_with_work(self, n: int) -> bool:
        """Return True if a plan of the size is found, with more work if the size is worth it."""
        if 1 / n >= WORTH_WORK:
            self._may_have_plan(n)
        return self._has_plan(n)

    def _may_have_plan(self, n: int) -> bool:
        """Return True unless there is proven to be no plan of the size, with more work than to find one.

        Sizes get none where the bound of the size that was given up last, scaled, is within the budget.
        """
        if not self._has_plan(n) and self._found[n][1] is None and self._least(n) > self._unprovable:
            self._found[n] = self._found[n][0], self._find_plan(n, LAST_WORK)
        return self._has_plan(n) or self._found[n][1] is None

    def _find_plan(self, n: int, work_limit: float) -> bool | None:
        """Return True if a plan of the size is found, False if there is proven to be none."""
        try:
            self._latest = self._planned(n, gap=1.0, work_limit=work_limit)
        except InfeasibleBudget:  # with moves to the host, it is about plans without
            return None if self._constraints.host_budget_bytes else False
        except SolverOutOfTime as error:
            if work_limit == LAST_WORK:
                self._unprovable = self._least(n) * self._budget / (error.proven_floor or self._budget)
            return None
        return True

    def _planned(
        self,
        n: int,
        *,
        gap: float = DEFAULT_GAP,
        step_gap: float | None = None,
        constraints: Constraints | None = None,
        work_limit: float = WORK_LIMIT,
    ) -> Plan:
        """Return a plan of the size. If none is found, it is the latest one of another size, if that fits."""
        profile, constraints = self._at(n), constraints or self._constraints
        terms: Any = {"constraints": constraints, "gap": gap, "step_gap": step_gap, "work_limit": work_limit}
        try:
            return plan_with_host(profile, budget_bytes=self._budget, **terms)
        except SolverOutOfTime:
            latest = self._latest and carried(self._latest.policy(), profile)
            if latest is None or latest.peak > self._budget or latest.constraints != constraints:
                raise
            return latest

    def _plan(self, n: int, constraints: Constraints | None = None) -> FitRow:
        planned = self._planned(n, step_gap=STEP_GAP, constraints=constraints)
        size, extra_us = n * self._multiple, planned.extra_us
        row = FitRow(size, planned.ceiling, planned.peak, extra_us, planned.step_us + extra_us, 0.0, planned)
        return replace(row, per_second=size / self._us(row) * 1e6)

    def _us(self, row: FitRow, count: int = 1) -> float:
        """Return the time of `count` micro-batches, with the optimizer's step."""
        return count * row.step_us + self._sizes.optimizer_us_of_batch

    def _row(self, n: int) -> float:
        """Plan a size for the table; return its speed.

        Its times are those of its own profile, until the times of one were those between its neighbors.
        """
        if n not in self._rows:
            size, joined = n * self._multiple, self._sizes.joined
            if self._bent and joined is not None and joined.sizes[0] < size and size not in joined.sizes:
                before_us = step_time_us(build(joined.at(size)))
                self._join(n)
                after_us = step_time_us(build(self._at(n)))
                self._bent = abs(before_us - after_us) > BENT * after_us
            self._rows[n] = self._plan(n)
        return self._rows[n].per_second

    def _fastest(self, largest: int, all_saved: int) -> int:
        """Plan the sizes of the table, and return the fastest, which has a profile of its own."""
        for share in (16, 8, 4, 2, 1):
            if all_saved // share:
                self._row(all_saved // share)
        self._row(largest)
        while True:
            while len(self._rows) < MOST_PLANS and (n := self._next_to_plan()) is not None:
                self._row(n)
            fastest = max(sorted(self._rows), key=self._row)
            if fastest * self._multiple in self._sizes.profiled:
                return fastest
            self._confirmed(fastest)

    def _confirmed(self, n: int) -> FitRow:
        """Return the row of a size, planned by a profile of its own."""
        if n * self._multiple not in self._sizes.profiled:
            self._sizes.profile(n * self._multiple)
            del self._rows[n]
            self._row(n)
        return self._rows[n]

    def _next_to_plan(self) -> int | None:
        """Return a size halfway from the fastest one so far to a neighbor; None if there is none."""
        known = sorted(self._rows)
        fastest = max(known, key=self._row)
        gaps = [(b - a, (a + b) // 2) for a, b in pairwise(known) if fastest in (a, b)]
        width, middle = max(gaps, default=(0, 0))
        return middle if width > 1 else None

    def _parts(self, n: int) -> list[tuple[int, FitRow]]:
        """Return counts of equal micro-batches of a size, each with the row of one, the fastest first."""
        adding = self._constraints.model_copy(update={"gradients": "present"})
        ways: dict[int, FitRow] = {}
        for count in (k for k in range(2, MOST_MICRO_BATCHES + 1) if n % k == 0):
            with suppress(InfeasibleBudget, SolverOutOfTime):
                ways[count] = self._plan(n // count, adding)
        return sorted(ways.items(), key=lambda way: way[0] * way[1].step_us)

    def _time(
        self, largest: int, all_saved: int, parts: list[tuple[int, FitRow]]
    ) -> tuple[int, list[int], tuple[int, Quartiles] | None]:
        """Time planned steps of sizes that may be the fastest, and of the largest in micro-batches.

        Returns:
            The fastest size, those that may be instead, and how many micro-batches are the fastest, with the
            share of the time that they take; None where they were not timed.
        """
        by_speed = sorted(self._rows, key=self._row, reverse=True)
        sizes = list(dict.fromkeys([largest, *([all_saved] if all_saved else []), *by_speed]))[:MOST_TIMED]
        ways = [PlannedSize(n * self._multiple, self._confirmed(n).plan.policy()) for n in sizes]
        most_us = (1 + MAY_BE_LESS) * self._us(self._rows[largest])
        likely = [(k, part) for k, part in parts if self._us(part, k) < most_us]
        splits = [PlannedSize(part.size, part.plan.policy(), k) for k, part in likely]
        ways = [ways[0], *splits[:1], *ways[1:], *splits[1:2]][:MOST_TIMED]
        taken = self._times(ways)
        if not taken:
            return by_speed[0], [], None
        rates = {}
        for way, times in zip(ways, taken, strict=True):
            if way.batches == 1:
                n = way.size // self._multiple
                rates[n] = [way.size / us * 1e6 for us in times]
                self._rows[n] = replace(self._rows[n], measured=Quartiles.of(rates[n]))
        fastest = max(rates, key=lambda n: Quartiles.of(rates[n]).median)
        slower = [n for n in sorted(rates) if n != fastest]
        equals = [n for n in slower if Quartiles.of_ratios(rates[n], rates[fastest]).high >= 1]
        ratios = [(way.batches, Quartiles.of_ratios(taken[i], taken[0])) for i, way in enumerate(ways)]
        split = min((r for r in ratios if r[0] > 1), key=lambda r: r[1].median, default=None)
        return fastest, equals, split

    def _times(self, ways: list[PlannedSize]) -> list[list[float]]:
        """Return the times of steps in turns; nothing if there was no room."""
        try:
            taken = times_in_turns(self._sizes.setup, ways, self._sizes.autocast)
        except torch.OutOfMemoryError:
            return []
        return [[us + self._sizes.optimizer_us_of_batch for us in times] for times in taken]


def _last(holds: Callable[[int], bool], low: int, high: int, width: int = 1) -> int:
    """Return the last number from `low` to `high` that holds, as all before it do and none after it.

    `low` holds. The width doubles from there, so that few numbers far beyond are tried.
    """
    width = max(width, 1)
    while low + width <= high and holds(low + width):
        low, width = low + width, 2 * width
    high = min(high, low + width - 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
