"""Give the Profile of a step at any size, from profiles of a few sizes: the *knots*.

NOTE [ Sizes ]

A size is the batch, or the number of tokens. Profiles at several sizes can be joined if they have the same op
stream: all columns but bytes, times and shapes are equal.

a. *Request.* The bytes that a step requests for one block are affine in the size: `a + b * size`. Attention
   that makes its scores, and images by their side, have a square in it. So the knots are profiled with a
   rounding of 1. Two knots give the line, three the parabola, in whole numbers. At least one knot more must
   lie on it to the byte, or else the column is *measured only*: straight lines between neighboring knots.
b. *Round.* The allocator's rounding comes afterwards, for each block by itself. One of the knots is profiled
   with it, too: what does not change with the size (parameters) is read from there.
c. *Fold.* Bytes that are live at once are a sum over several blocks, and a peak is the largest of such sums,
   so neither is affine. Both are summed up again, from the blocks in `Profile.temporaries`. `_Reading` says
   which sum a number is; it must give the number of every knot, or else the column is measured only.
d. *Times* lie on straight lines between neighboring knots. Beyond the knots no run time is known: there, the
   times are those of the nearest knot, and a note says so. Exact columns are exact there, too.

A worked example: a block of 3 bytes for each sample and a scalar of 4, on a device that rounds to 512. Both
are live at once, and then a block of 6 bytes for each sample.

    size            requests          rounded             live at once: at most
    100             300, 4, 600       512, 512, 1024      1024
    200             600, 4, 1200      1024, 512, 1536     1536
    150 (at)        450, 4, 900       512, 512, 1024      1024, where a line through the peaks has 1280

This file knows neither budgets nor plans.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

from autoac.planner.errors import PlannerError
from autoac.planner.formats.profile import Profile, StaticBytes
from autoac.planner.units import rounded_bytes

_NUMBER = re.compile(r"\d+")
_LEAF = re.compile(r"[a-z]+(\d*)\w*\[([\d, ]*)\]")  # "int64[4, 128]"

_TIMES = ("ops.runtime_us", "ops.spread_us", "backward.runtime_us")
_BLOCKS = ("storages.nbytes", "temporaries.nbytes", "ops.workspace_nbytes")  # one block for each row
_SUMS = ("ops.other_nbytes", "backward.other_nbytes", "backward.peak_nbytes")
_STATIC = tuple(f"static.{name}" for name in StaticBytes.model_fields)
_BYTES = (*_BLOCKS, *_SUMS, *_STATIC, *(name for name in Profile.model_fields if name.endswith("nbytes")))
_FREE = {*_BYTES, *_TIMES, "ops.flops", "inputs", "notes", "link", "environment"}


@dataclass(frozen=True, slots=True)
class _Reading:
    """The bytes live after some changes to the temporaries: the most, between two counts of changes."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ProfileBySize:
    """The profiles of a step at any size.

    Invariant: the knots ascend, and all have the op stream of `rounded`.
    """

    sizes: tuple[int, ...]  # the knots
    profiles: tuple[Profile, ...] = field(repr=False)  # of the knots, with a rounding of 1
    rounded: Profile = field(repr=False)  # of one of them, as the allocator rounds
    measured_only: tuple[str, ...]  # columns that are not exact between the knots
    degrees: Mapping[str, int] = field(repr=False)  # rule a, by column: 1, 2, or 0 if measured only
    readings: Mapping[str, tuple[_Reading | None, ...]] = field(repr=False)  # rule c, by column

    @classmethod
    def of(cls, knots: Mapping[int, Profile], rounded: tuple[int, Profile]) -> ProfileBySize:
        """Return the profiles by size through `knots`.

        Args:
            knots: at least two profiles by size, of a device with a rounding of 1.
            rounded: one of the sizes, with its profile on the device itself.

        Raises:
            PlannerError: the steps have different ops.
        """
        sizes = tuple(sorted(knots))
        assert len(sizes) > 1, "one profile has no slope"
        assert all(profile.environment.allocator_rounding == 1 for profile in knots.values())
        profiles = tuple(knots[size] for size in sizes)
        stream = stream_of(rounded[1])
        for size in sizes:
            if stream_of(knots[size]) != stream:
                raise PlannerError(
                    f"profiles must have equal ops to be joined, got other ops at the sizes {rounded[0]} and "
                    f"{size}; join sizes that are closer to each other"
                )
        readings = _readings([*profiles, rounded[1]])
        degrees = {
            name: _degree(sizes, [_column(profile, name) for profile in profiles])
            for name in (*_BYTES, "ops.flops")
        }
        result = cls(sizes, profiles, rounded[1], (), degrees, readings)
        return replace(result, measured_only=result._measured_only(rounded))

    def at(self, size: int) -> Profile:
        """Return the profile at `size`; see NOTE [ Sizes ] for what holds beyond the knots."""
        requested = {name: self._curve(name, size) for name in _BYTES}
        nearest = min(max(size, self.sizes[0]), self.sizes[-1])
        note = f"run times and bytes follow from profiles at the sizes {', '.join(map(str, self.sizes))}"
        if size != nearest:
            note = f"run times are those of size {nearest}: no larger or smaller size was profiled"
        columns: dict[str, tuple[Any, ...]] = {name: self._times(name, nearest) for name in _TIMES}
        columns |= {"ops.flops": self._curve("ops.flops", size), "inputs": tuple(self._inputs(size))}
        columns |= {"notes": (*self.rounded.notes, note)} | self._rounded(size, requested)
        return _with_columns(self.rounded, columns)

    def _rounded(self, size: int, requested: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the columns of bytes as the allocator rounds them (rules b and c)."""
        rounding = self.rounded.environment.allocator_rounding
        values = {
            name: tuple(rounded_bytes(nbytes, rounding) for nbytes in requested[name]) for name in _BLOCKS
        }
        live = _live(self.rounded.temporaries.changes.items, values["temporaries.nbytes"])
        for name, readings in self.readings.items():
            values[name] = tuple(
                rounded_bytes(nbytes, rounding)
                if reading is None
                else max(live[reading.begin : reading.end + 1])
                for nbytes, reading in zip(requested[name], readings, strict=True)
            )
        for name in requested.keys() - values.keys():
            same = len({_column(profile, name) for profile in self.profiles}) == 1
            column = _column(self.rounded, name) if same else requested[name]
            values[name] = tuple(rounded_bytes(nbytes, rounding) for nbytes in column)
        values["static.inputs"] = (self._inputs_nbytes(size),)
        return values

    def _measured_only(self, rounded: tuple[int, Profile]) -> tuple[str, ...]:
        """Return the columns of bytes that are not exact, or differ from the profile that is rounded."""
        there = self.at(rounded[0])
        return tuple(
            name
            for name in _BYTES
            if (not self.degrees[name] and not all(self.readings.get(name, (None,))))
            or _column(there, name) != _column(rounded[1], name)
        )

    def _between(self, size: int) -> tuple[int, int]:
        """Return the positions of the two knots around `size`, or next to it."""
        i = next((i for i, (_, b) in enumerate(pairwise(self.sizes)) if size <= b), len(self.sizes) - 2)
        return i, i + 1

    def _curve(self, name: str, size: int) -> tuple[int, ...]:
        """Return the column on its curve through the knots, rounded up to whole bytes."""
        degree = self.degrees[name]
        chosen = _spread(len(self.sizes), degree + 1) if degree else self._between(size)
        weights, divisor = _weights([self.sizes[i] for i in chosen], size)
        on_curve = _on_curve([_column(self.profiles[i], name) for i in chosen], weights)
        return tuple(max(0, -(-value // divisor)) for value in on_curve)

    def _times(self, name: str, size: int) -> tuple[float, ...]:
        i, j = self._between(size)
        share = (size - self.sizes[i]) / (self.sizes[j] - self.sizes[i])
        low, high = _column(self.profiles[i], name), _column(self.profiles[j], name)
        return tuple(round(a + (b - a) * share, 3) for a, b in zip(low, high, strict=True))

    def _inputs(self, size: int) -> Iterator[str]:
        """Yield the shapes of the batch."""
        i, j = self._between(size)
        run, width = size - self.sizes[i], self.sizes[j] - self.sizes[i]
        for a, b in zip(self.profiles[i].inputs, self.profiles[j].inputs, strict=True):
            others = iter(map(int, _NUMBER.findall(b)))
            yield _NUMBER.sub(lambda m, rest=others: _moved(int(m[0]), next(rest), run, width), a)  # type: ignore[misc]

    def _inputs_nbytes(self, size: int) -> int:
        """Return the bytes of the batch, each tensor rounded by itself; tensors of one shape may be one."""
        rounding = self.rounded.environment.allocator_rounding
        [requested] = self._curve("static.inputs", size)
        leaves = tuple(self._inputs(size))
        for each in (leaves, tuple(dict.fromkeys(leaves))):
            sizes = [_leaf_nbytes(leaf) for leaf in each]
            if sum(sizes) == requested:
                return sum(rounded_bytes(nbytes, rounding) for nbytes in sizes)
        return rounded_bytes(requested, rounding)


def stream_of(profile: Profile) -> tuple[Any, ...]:
    """Return everything but bytes, times and shapes: equal for profiles that can be joined."""
    columns = []
    for name in type(profile).model_fields:
        value = getattr(profile, name)
        if hasattr(type(value), "model_fields") and name not in _FREE:
            columns += [
                getattr(value, column)
                for column in type(value).model_fields
                if f"{name}.{column}" not in _FREE
            ]
        elif name not in _FREE:
            columns.append(value)
    return tuple(columns)


def _degree(sizes: Sequence[int], columns: Sequence[tuple[int, ...]]) -> int:
    """Return the degree of the curve that a knot more confirms, without one of a line; 0 if none does."""
    for degree, fewest in ((1, 2), (2, 4)):
        if len(sizes) < fewest:
            break
        chosen = _spread(len(sizes), degree + 1)
        curve = [columns[i] for i in chosen]
        every = [_weights([sizes[i] for i in chosen], size) for size in sizes]
        if all(
            _on_curve(curve, weights) == tuple(value * divisor for value in column)
            for (weights, divisor), column in zip(every, columns, strict=True)
        ):
            return degree
    return 0


def _spread(n: int, count: int) -> tuple[int, ...]:
    """Return `count` of `n` positions, the first and the last among them."""
    return tuple(i * (n - 1) // (count - 1) for i in range(count))


def _weights(knots: Sequence[int], size: int) -> tuple[list[int], int]:
    """Return the weights of the knots in the value of their curve at `size`, and the divisor (Lagrange)."""
    shares = [
        math.prod((Fraction(size - j, i - j) for j in knots if j != i), start=Fraction(1)) for i in knots
    ]
    divisor = math.lcm(*(share.denominator for share in shares))
    return [int(share * divisor) for share in shares], divisor


def _on_curve(columns: Sequence[tuple[int, ...]], weights: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(map(mul, row, weights)) for row in zip(*columns, strict=True))


def _readings(profiles: Sequence[Profile]) -> dict[str, tuple[_Reading | None, ...]]:
    """Return which sums of live temporaries the columns of `profiles` are (rule c).

    A moment begins after some of the changes in its row: what comes before the first op is in its row, too.
    The first position counts that gives the number in every profile.
    """
    changes = profiles[0].temporaries.changes
    lives = [_live(changes.items, profile.temporaries.nbytes) for profile in profiles]
    n, end = len(profiles[0].ops), len(changes)
    rows = list(pairwise(changes.starts))
    if not rows:
        return {}

    def sums(name: str, moments: Sequence[tuple[int, int]], *, peak: bool) -> tuple[_Reading | None, ...]:
        columns = [_column(profile, name) for profile in profiles]
        return tuple(
            _first_reading(lives, row, begin, until, peak=peak)
            for row, (begin, until) in zip(zip(*columns, strict=True), moments, strict=True)
        )

    last = len(changes.items)
    return {
        "ops.other_nbytes": sums("ops.other_nbytes", rows[:n], peak=False),
        "backward.other_nbytes": sums("backward.other_nbytes", rows[n:end], peak=False),
        "backward.peak_nbytes": sums("backward.peak_nbytes", rows[n:end], peak=True),
        "gradient_nbytes": sums("gradient_nbytes", [(last, last)], peak=False),
    }


def _first_reading(
    lives: Sequence[Sequence[int]], values: Sequence[int], begin: int, end: int, *, peak: bool
) -> _Reading | None:
    for position in range(begin, end + 1):
        until = end if peak else position
        if all(max(live[position : until + 1]) == value for live, value in zip(lives, values, strict=True)):
            return _Reading(position, until)
    return None


def _live(changes: Sequence[int], nbytes: Sequence[int]) -> list[int]:
    """Return the bytes live before the first change, and after each."""
    seen: set[int] = set()
    steps = [0]
    for block in changes:
        steps.append(-nbytes[block] if block in seen else nbytes[block])
        seen.add(block)
    return list(accumulate(steps))


def _column(profile: Profile, name: str) -> tuple[Any, ...]:
    """Return a column of a profile; a number is a column of one row."""
    table, _, column = name.partition(".")
    value = getattr(profile, table)
    value = getattr(value, column) if column else value
    return value if isinstance(value, tuple) else (value,)


def _with_columns(profile: Profile, columns: Mapping[str, Any]) -> Profile:
    """Return `profile` with these columns."""
    tables: dict[str, dict[str, Any]] = {}
    for name, values in columns.items():
        table, _, column = name.partition(".")
        is_number = table == "static" or (not column and table.endswith("nbytes"))
        tables.setdefault(table, {})[column] = values[0] if is_number else values
    return profile.model_copy(
        update={
            table: new[""] if "" in new else getattr(profile, table).model_copy(update=new)
            for table, new in tables.items()
        }
    )


def _moved(low: int, high: int, run: int, width: int) -> str:
    return str(low + (high - low) * run // width)


def _leaf_nbytes(leaf: str) -> int:
    """Return the bytes of the elements that the name of a leaf describes; 0 if it is not a tensor.

    >>> _leaf_nbytes("int64[4, 128]"), _leaf_nbytes("bool[3]"), _leaf_nbytes("str")
    (4096, 3, 0)
    """
    match = _LEAF.fullmatch(leaf)
    if match is None:
        return 0
    elements = 1
    for dim in filter(None, match[2].split(",")):
        elements *= int(dim)
    return elements * max(1, int(match[1] or 8) // 8)
