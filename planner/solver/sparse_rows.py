"""Linear rows over decisions, collected as arrays.

A *code* stands for a number between 0 and 1: `ZERO`; `c + 1` for column `c`; `-(c + 1)` for one minus
column `c`. Column 0 is fixed at 1, so `ONE` is a code like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoac.planner.solver.highs import Floats, Rows

Codes = npt.NDArray[np.int64]

ZERO, ONE = 0, 1


@dataclass(frozen=True, slots=True, eq=False)
class Largest:
    """Columns that are the largest of some expressions and 0: how to give them a value."""

    columns: Codes  # by expression; the same column may come more than once
    of: Codes  # by term: the expression it belongs to
    codes: Codes  # by term
    coefficients: Floats
    constants: Floats  # by expression
    in_turn: bool = False  # an expression may be of columns that come before its own

    def assign(self, values: Floats) -> None:
        """Give the columns their values, in `values`, from those of the others."""
        if not self.in_turn:
            terms = self.coefficients * value_of(self.codes, values)
            reached = np.bincount(self.of, terms, len(self.constants)) + self.constants
            np.maximum.at(values, self.columns, reached)
            return
        begins = np.searchsorted(self.of, np.arange(len(self.columns) + 1))
        for i, column in enumerate(self.columns):
            mine = slice(begins[i], begins[i + 1])
            reached = self.coefficients[mine] @ value_of(self.codes[mine], values) + self.constants[i]
            values[column] = max(values[column], reached)


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
        """All rows, terms of the same column added up, without those that every assignment satisfies."""
        if not self._count:
            nothing = np.empty(0)
            return Rows(
                np.zeros(1, np.int32), np.empty(0, np.int32), nothing.copy(), nothing.copy(), nothing.copy()
            )
        of, codes = np.concatenate(self._of), np.concatenate(self._codes)
        coefficients, bounds = np.concatenate(self._coefficients), np.concatenate(self._bounds)
        count = len(bounds)
        constant = (codes < 0) | (codes == ONE)  # 1 - x, or 1
        bounds = bounds - np.bincount(of[constant], coefficients[constant], count)
        column = np.abs(codes) - 1
        kept = column > 0
        of, column, coefficients = of[kept], column[kept], (coefficients * np.sign(codes))[kept]

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
        needed = most > bounds + 1e-12
        kept = needed[of]
        lengths = np.bincount(of[kept], minlength=count)[needed]
        return Rows(
            starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            columns=column[kept].astype(np.int32),
            coefficients=total[kept],
            lower=np.full(len(lengths), -np.inf),
            upper=bounds[needed],
        )


def value_of(codes: Codes, values: Floats) -> Floats:
    """What `codes` stand for under an assignment of the columns."""
    plain = np.where(codes == ZERO, 0.0, values[np.maximum(np.abs(codes) - 1, 0)])
    return np.where(codes < 0, 1.0 - plain, plain)
