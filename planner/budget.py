"""Budgets as people pass them: GiB, positive, finite, and not by mistake in bytes."""

from __future__ import annotations

import math
from numbers import Integral, Real

from autoac.planner.errors import InvalidBudget
from autoac.planner.units import GIB, bytes_from_gb, format_bytes

MOST_GB = 1 << 20
"""More GiB than any device has: a budget beyond was meant in bytes."""


def budget_in_bytes(gb: object, name: str = "budget_gb") -> int:
    """Return the whole bytes in `gb` GiB.

    Args:
        gb: a budget.
        name: the argument that it was passed as, for the error.

    Raises:
        InvalidBudget: `gb` is not a positive, finite number, or so large that bytes were meant.
    """
    number = _number(gb, name, "a positive number of GiB")
    if number <= 0:
        raise InvalidBudget(f"{name} must be a positive number of GiB, got {gb!r}")
    return bytes_from_gb(number)


def amount_in_bytes(gb: object, name: str) -> int:
    """Return `gb` GiB in bytes. Unlike a budget of the device, the amount may be 0.

    Raises:
        InvalidBudget: `gb` is not a finite number from 0, or so large that bytes were meant.
    """
    number = _number(gb, name, "a number of GiB from 0")
    if number < 0:
        raise InvalidBudget(f"{name} must be a number of GiB from 0, got {gb!r}")
    return bytes_from_gb(number)


def one_budget(budget_gb: float | None, budget_bytes: int | None, headroom_bytes: int = 0) -> int:
    """Return the bytes of the one budget that is given, less the headroom.

    Raises:
        InvalidBudget: not exactly one is given, it is not positive, or the headroom leaves nothing of it.
    """
    if (budget_gb is None) == (budget_bytes is None):
        raise InvalidBudget(
            "exactly one of budget_gb and budget_bytes must be given, "
            f"got budget_gb={budget_gb}, budget_bytes={budget_bytes}"
        )
    if budget_gb is not None:
        nbytes = budget_in_bytes(budget_gb)
    elif isinstance(budget_bytes, Integral) and not isinstance(budget_bytes, bool) and budget_bytes > 0:
        nbytes = int(budget_bytes)
    else:
        raise InvalidBudget(f"budget_bytes must be a positive whole number, got {budget_bytes!r}")
    if nbytes - headroom_bytes <= 0:
        raise InvalidBudget(
            f"the headroom of {format_bytes(headroom_bytes)} leaves nothing of a budget of "
            f"{format_bytes(nbytes)}: pass a smaller headroom or a larger budget"
        )
    return nbytes - headroom_bytes


def _number(gb: object, name: str, requirement: str) -> float:
    try:
        number = float(gb) if isinstance(gb, Real) and not isinstance(gb, bool) else math.nan
    except OverflowError:  # an integer of 400 digits
        number = math.inf
    if not math.isfinite(number):
        raise InvalidBudget(f"{name} must be {requirement}, got {gb!r}")
    if number > MOST_GB:
        meant = f"did you pass bytes? They are {name}={number / GIB:.6g}"
        raise InvalidBudget(f"{name} must be in GiB and at most {MOST_GB}, got {gb!r}; {meant}")
    return number
