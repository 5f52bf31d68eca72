"""Collect linear rows over decisions as arrays.

A *code* stands for a number between 0 and 1: `ZERO`; `c + 1` for column `c`; `-(c + 1)` for one minus
column `c`. Column 0 is fixed at 1, so `ONE` is a code like any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoac.planner.solver.highs import Floats, Rows

Codes = npt.NDArray[np.int64]

ZERO, ONE = 0, 1


@dataclass(slots=True)
class LinearSum:
    """Terms of one row: codes with coefficients, and a constant."""

    codes: list[Codes]
    coefficients: list[Floats]
    constant: float = 0.0

    def add(self, codes: Codes, coefficients: npt.ArrayLike) -> None:
        """Add terms: one code and one coefficient each."""
        self.codes.append(codes)
        self.coefficients.append(np.asarray(coefficients, np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class MaximumColumns:
    """Columns whose values are max(0, e1, e2, ...), where e1, e2, ... are expressions over other columns."""

    columns: Codes  # by expression; the same column may come more than once
    expression: Codes  # by term: the expression it belongs to
    codes: Codes  # by term
    coefficients: Floats
    constants: Floats  # by expression
    sequential: bool = False  # an expression may be of columns that come before its own

    def assign(self, values: Floats) -> None:
        """Set the values of these columns in `values`; they follow from the values of other columns."""
        if not self.sequential:
            terms = self.coefficients * values_of(self.codes, values)
            sums = np.bincount(self.expression, terms, len(self.constants)) + self.constants
            np.maximum.at(values, self.columns, sums)
            return
        begins = np.searchsorted(self.expression, np.arange(len(self.columns) + 1))
        for i, column in enumerate(self.columns):
            mine = slice(begins[i], begins[i + 1])
            total = self.coefficients[mine] @ values_of(self.codes[mine], values) + self.constants[i]
            values[column] = max(values[column], total)


class SequentialMaxima:
    """Rows `column >= expression` that are added one at a time. An expression may have earlier columns."""

    def __init__(self) -> None:
        self.columns: list[int] = []
        self._terms: list[tuple[int, int, float]] = []  # expression, code, coefficient
        self._constants: list[float] = []

    def add(self, column: int, expression: Iterable[tuple[int, float]], constant: float) -> None:
        """Add `column >= expression + constant`."""
        self._terms += [(len(self.columns), code, a) for code, a in expression if code != ZERO]
        self.columns.append(column)
        self._constants.append(constant)

    def finish(self, table: RowTable) -> MaximumColumns:
        """Add the rows to `table` and return the columns."""
        expression, codes, coefficients = (np.array(t) for t in zip(*self._terms, strict=True))
        columns, constants = np.array(self.columns), np.array(self._constants)
        table.add(
            np.concatenate([expression, np.arange(len(columns))]),
            np.concatenate([codes, columns + 1]),
            np.concatenate([coefficients, np.full(len(columns), -1.0)]),
            -constants,
        )
        return MaximumColumns(columns, expression, codes, coefficients, constants, sequential=True)


class RowTable:
    """Rows `sum of coefficient * code <= bound`, given in any number of batches."""

    def __init__(self) -> None:
        self._count = 0
        self._of: list[Codes] = []
        self._codes: list[Codes] = []
        self._coefficients: list[Floats] = []
        self._bounds: list[Floats] = []

    def add(
        self,
        of: npt.ArrayLike,
        codes: npt.ArrayLike,
        coefficients: npt.ArrayLike,
        bounds: npt.ArrayLike,
    ) -> None:
        """Add a batch: terms (row within the batch, code, coefficient), and one bound for each row.

        Args:
            of: (terms,) row of each term, from 0.
            codes: (terms,).
            coefficients: (terms,) or one number for all.
            bounds: (rows,).
        """
        bounds = np.atleast_1d(np.asarray(bounds, np.float64))
        codes = np.asarray(codes, np.int64)
        self._of.append(np.asarray(of, np.int64) + self._count)
        self._codes.append(codes)
        self._coefficients.append(np.broadcast_to(np.asarray(coefficients, np.float64), codes.shape))
        self._bounds.append(bounds)
        self._count += len(bounds)

    def add_table(self, codes: list[Codes], coefficients: list[float], bound: float) -> None:
        """Add rows of equal width: `codes[i]` holds term `i` of all rows, with `coefficients[i]`."""
        m, width = len(codes[0]), len(codes)
        of = np.tile(np.arange(m), width)
        self.add(of, np.concatenate(codes), np.repeat(coefficients, m), np.full(m, bound))

    def finish(self) -> Rows:
        """Return all rows, terms of one column added up, without rows that every assignment satisfies."""
        if not self._count:
            empty = np.empty(0)
            return Rows(np.zeros(1, np.int32), np.empty(0, np.int32), empty, empty, empty)
        of, codes = np.concatenate(self._of), np.concatenate(self._codes)
        coefficients, bounds = np.concatenate(self._coefficients), np.concatenate(self._bounds)
        count = len(bounds)
        constant = (codes < 0) | (codes == ONE)  # 1 - x, or 1
        bounds = bounds - np.bincount(of[constant], coefficients[constant], count)
        column = np.abs(codes) - 1
        variable = column > 0
        of, column, coefficients = of[variable], column[variable], (coefficients * np.sign(codes))[variable]

        width = int(column.max(initial=0)) + 1
        key = of * width + column
        order = np.argsort(key, kind="stable")
        key, coefficients = key[order], coefficients[order]
        first = np.flatnonzero(np.diff(key, prepend=-1))
        total = np.add.reduceat(coefficients, first) if len(first) else coefficients
        key = key[first]
        nonzero = total != 0
        key, total = key[nonzero], total[nonzero]
        of, column = key // width, key % width

        most = np.bincount(of, np.maximum(total, 0.0), count)
        binding = most > bounds + 1e-12
        of_binding = binding[of]
        lengths = np.bincount(of[of_binding], minlength=count)[binding]
        return Rows(
            starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            columns=column[of_binding].astype(np.int32),
            coefficients=total[of_binding],
            lower=np.full(len(lengths), -np.inf),
            upper=bounds[binding],
        )


def values_of(codes: Codes, values: Floats) -> Floats:
    """Return the numbers that `codes` stand for when the columns have `values`."""
    plain = np.where(codes == ZERO, 0.0, values[np.maximum(np.abs(codes) - 1, 0)])
    return np.where(codes < 0, 1.0 - plain, plain)
