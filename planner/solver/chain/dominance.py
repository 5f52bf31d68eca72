"""Leave out what is worse in every way."""

from __future__ import annotations

import numpy as np

from autoac.planner.solver.arrays import Floats


def not_dominated(numbers: Floats) -> list[int]:
    """Return the rows that no other row is at most as large as in each column, each once."""
    best: list[int] = []
    kept = np.empty_like(numbers)
    for row in np.lexsort(numbers.T[::-1]).tolist():
        if not (kept[: len(best)] <= numbers[row]).all(axis=1).any():
            kept[len(best)] = numbers[row]
            best.append(row)
    return best
