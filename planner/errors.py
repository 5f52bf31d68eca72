"""What can go wrong in the planner.

    PlannerError
    +-- MalformedProfile      the data is no Profile
    +-- MalformedPolicy       the data is no Policy
    +-- UnknownVersion        it is one, of a version that this release does not read
    +-- InvalidBudget         not a positive number of bytes
    +-- UnknownOp             a save set names an op that the graph does not have
    +-- InfeasibleBudget      no plan fits; says what would
    +-- SolverOutOfTime       the time was over before any plan was found

Each error carries its numbers as fields and pickles, since it crosses a process boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoac.planner.units import format_bytes, gb_from_bytes


class PlannerError(Exception):
    """Base of all errors of the planner."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(kind: type[PlannerError], args: tuple[Any, ...], fields: dict[str, Any]) -> PlannerError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class MalformedProfile(PlannerError):
    """The data is no Profile. `problems` has a line for each thing found, the first few."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("not a valid profile: " + "; ".join(self.problems))


class MalformedPolicy(PlannerError):
    """The data is no Policy. `problems` has a line for each thing found, the first few."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("not a valid policy: " + "; ".join(self.problems))


class UnknownVersion(PlannerError):
    """The format is known and the version is not."""

    def __init__(self, format: str, version: object, known: int) -> None:
        self.format, self.version, self.known = format, version, known
        super().__init__(
            f"{format} version {version!r} is not known here; this release reads version {known}. "
            "Make it again with this release, or update the side that reads it."
        )


class InvalidBudget(PlannerError):
    """A budget that is not a positive, finite number."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class UnknownOp(PlannerError):
    """A save set names an op that the graph does not have."""

    def __init__(self, op: int, n_ops: int) -> None:
        self.op, self.n_ops = op, n_ops
        super().__init__(f"op {op} is not in this graph, which has ops 0 to {n_ops - 1}")


@dataclass(frozen=True, slots=True)
class Holding:
    """Something that is live at a peak."""

    nbytes: int
    name: str  # an op's key, or a kind of static bytes
    why: str  # "saved", "recomputed", "not planned", ...


class InfeasibleBudget(PlannerError):
    """No plan fits in the budget.

    Fields, all in bytes: `budget`; `proven_floor`, which no save set beats; `smallest_found`, the
    smallest peak of any plan that was found, or None. `peak_at` names the place of that peak and
    `live` what is live there, largest first.
    """

    def __init__(
        self,
        budget: int,
        proven_floor: int,
        smallest_found: int | None,
        peak_at: str,
        live: Sequence[Holding],
    ) -> None:
        self.budget, self.proven_floor, self.smallest_found = budget, proven_floor, smallest_found
        self.peak_at, self.live = peak_at, tuple(live)
        needed = smallest_found if smallest_found is not None else proven_floor
        lines = [
            f"No plan fits in {format_bytes(budget)}: the step needs at least {format_bytes(proven_floor)}."
        ]
        if smallest_found is not None:
            lines.append(f"The smallest peak found is {format_bytes(smallest_found)}.")
        if self.live:
            lines.append(f"That peak is at {peak_at}, while these are live:")
            lines += [f"  {format_bytes(h.nbytes):>10}  {h.name}  ({h.why})" for h in self.live[:8]]
        lines.append(f"Pass budget_gb={_ceil_gb(needed)} or more, or use a smaller batch.")
        super().__init__("\n".join(lines))


class SolverOutOfTime(PlannerError):
    """The time was over before any plan within the budget was found."""

    def __init__(self, budget: int, time_limit_s: float) -> None:
        self.budget, self.time_limit_s = budget, time_limit_s
        super().__init__(
            f"no plan within {format_bytes(budget)} was found in {time_limit_s:g} s, and none was ruled out; "
            "allow more time or a larger budget"
        )


def _ceil_gb(nbytes: int) -> str:
    text = f"{gb_from_bytes(nbytes):.3f}"
    return text if float(text) >= gb_from_bytes(nbytes) else f"{gb_from_bytes(nbytes) + 0.001:.3f}"
