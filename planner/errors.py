"""What can go wrong in the planner.

    PlannerError
    +-- MalformedProfile      the data is no Profile
    +-- MalformedPolicy       the data is no Policy
    +-- UnknownVersion        it is one, of a version that this release does not read
    +-- InvalidBudget         not a positive number of bytes
    +-- InvalidLimit          a gap or a time limit that no search can keep to
    +-- UnknownOp             a save set names an op that the graph does not have
    +-- UnknownKey            no op has this key; says which come near
    +-- OtherProfile          a policy was not made for this profile
    +-- InvalidPipeline       no such schedule, or numbers that it does not take
    +-- InvalidConstraints    they cannot be met, whatever the budget
    |   +-- UnmatchedPattern      a pattern stands for nothing; says what comes near
    |   +-- ConflictingPins       an op would have to be saved and run again
    +-- InfeasibleBudget      no plan fits; says what would
    |   +-- InfeasibleConstraints   and constraints have to do with it
    +-- SolverOutOfTime       the work or the time was over before any plan was found

Each error carries its numbers as fields and pickles, since it crosses a process boundary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoac.planner.units import GIB, exact_bytes, format_bytes, gb_from_bytes

if TYPE_CHECKING:
    from autoac.planner.problem.graph import SaveSet


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


class InvalidLimit(PlannerError):
    """A gap that is no fraction, or a time limit that is no number of seconds. `name` is the argument."""

    def __init__(self, name: str, value: object, bound: str) -> None:
        self.name, self.value, self.bound = name, value, bound
        super().__init__(f"{name} must be {bound}, not {value!r}")


class UnknownOp(PlannerError):
    """A save set names an op that the graph does not have."""

    def __init__(self, op: int, n_ops: int) -> None:
        self.op, self.n_ops = op, n_ops
        super().__init__(f"op {op} is not in this graph, which has ops 0 to {n_ops - 1}")


class UnknownKey(PlannerError):
    """No op, or more than one, answers to a name that a person gave. `near` are keys to try instead."""

    def __init__(self, key: str, near: Sequence[str], n_ops: int) -> None:
        self.key, self.near, self.n_ops = key, tuple(near), n_ops
        advice = "pass a whole key: " + ", ".join(self.near) if self.near else "a policy lists all keys"
        super().__init__(f"{key!r} names none or several of the {n_ops} ops; {advice}")


class OtherProfile(PlannerError):
    """A policy and a profile do not belong together. `key` is the first op that only one of them has."""

    def __init__(self, policy_model: str, profile_model: str, key: str) -> None:
        self.policy_model, self.profile_model, self.key = policy_model, profile_model, key
        super().__init__(
            f"the policy for {policy_model} was not made for this profile of {profile_model}: only one of "
            f"them has {key!r}; pass the profile that the policy was planned from, or plan again"
        )


class InvalidPipeline(PlannerError):
    """No such schedule, or numbers of stages, microbatches or chunks that it does not take."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class InvalidConstraints(PlannerError):
    """Constraints that no plan of this profile can meet, whatever the budget."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class UnmatchedPattern(InvalidConstraints):
    """A pattern stands for no op or module. `near` are names to try instead."""

    def __init__(self, field: str, pattern: str, near: Sequence[str], n_ops: int) -> None:
        self.field, self.pattern, self.near, self.n_ops = field, pattern, tuple(near), n_ops
        advice = f"did you mean {' or '.join(self.near)}?" if self.near else "a policy lists all keys"
        super().__init__(f"{field} {pattern!r} stands for nothing among {n_ops} ops; {advice}")


class ConflictingPins(InvalidConstraints):
    """An op, or a pattern, would have to be saved and run again. `first` and `second` say who asks."""

    def __init__(self, key: str, first: str, second: str) -> None:
        self.key, self.first, self.second = key, first, second
        super().__init__(f"{key} cannot obey both: {first}; {second}. Take one of them off")


@dataclass(frozen=True, slots=True)
class Holding:
    """Something that is live at a peak."""

    nbytes: int
    name: str  # an op's key, or a kind of static bytes
    why: str  # "saved", "recomputed", "not planned", ...


MOST_HOLDINGS = 8  # that a text names


def holdings_in_lines(live: Sequence[Holding]) -> list[str]:
    """Return a line for each of the first few, and one for the rest."""
    few, rest = live[:MOST_HOLDINGS], live[MOST_HOLDINGS:]
    lines = [f"  {format_bytes(h.nbytes):>10}  {h.name}  ({h.why})" for h in few]
    if rest:
        lines.append(f"  {format_bytes(sum(h.nbytes for h in rest)):>10}  {len(rest)} more")
    return lines


class InfeasibleBudget(PlannerError):
    """No plan fits in the budget.

    Fields, all in bytes: `budget`; `proven_floor`, which no save set beats; `smallest_found`, the
    smallest peak of any plan that was found, or None. `peak_at` names the place of that peak and
    `live` what is live there, largest first. `save_set`, the ops that are saved for that peak, is a start for
    a plan within a larger budget of the same profile; None where a service planned.
    """

    def __init__(
        self,
        budget: int,
        proven_floor: int,
        smallest_found: int | None,
        peak_at: str,
        live: Sequence[Holding],
        save_set: SaveSet | None = None,
    ) -> None:
        self.budget, self.proven_floor, self.smallest_found = budget, proven_floor, smallest_found
        self.save_set = save_set
        self.peak_at, self.live = peak_at, tuple(live)
        needed = smallest_found if smallest_found is not None else proven_floor
        lines = [
            f"No plan fits in {exact_bytes(budget)}: the step needs at least {exact_bytes(proven_floor)}."
        ]
        if smallest_found is not None:
            lines.append(f"The smallest peak found is {exact_bytes(smallest_found)}.")
        if self.live:
            lines.append(f"That peak is at {peak_at}, while these are live:")
            lines += holdings_in_lines(self.live)
        lines.append(f"Pass budget_gb={_ceil_gb(needed)} or more, or use a smaller batch.")
        super().__init__("\n".join(lines))


class InfeasibleConstraints(InfeasibleBudget):
    """No plan fits in the budget under the constraints, and these have to do with it.

    Fields as of InfeasibleBudget. Where forward has a limit of its own, `proven_floor` and
    `smallest_found` are budgets at which that limit is raised by as much. `culprits` has a line for each
    constraint to blame and what it takes.
    """

    def __init__(
        self,
        budget: int,
        proven_floor: int,
        smallest_found: int | None,
        peak_at: str,
        live: Sequence[Holding],
        culprits: Sequence[str],
        save_set: SaveSet | None = None,
    ) -> None:
        super().__init__(budget, proven_floor, smallest_found, peak_at, live, save_set)
        self.culprits = tuple(culprits)
        self.args = ("\n".join([str(self.args[0]), *self.culprits]),)


class SolverOutOfTime(PlannerError):
    """The limits on work and time were reached before any plan within the budget was found.

    Fields as of InfeasibleBudget, in bytes: `budget`, `proven_floor`, `smallest_found`; the last two are
    None where a service that does not say them planned. `time_limit_s` is the limit that was asked for.
    """

    def __init__(
        self,
        budget: int,
        time_limit_s: float,
        proven_floor: int | None = None,
        smallest_found: int | None = None,
    ) -> None:
        self.budget, self.time_limit_s = budget, time_limit_s
        self.proven_floor, self.smallest_found = proven_floor, smallest_found
        tried = (
            f"no plan within {format_bytes(budget)} was found within the limits on work and time "
            f"({time_limit_s:g} s), and none was ruled out"
        )
        if smallest_found is None or proven_floor is None:
            super().__init__(f"{tried}; pass a larger budget")
            return
        super().__init__(
            f"{tried}; the smallest peak found is {format_bytes(smallest_found)} (proven bound "
            f"{format_bytes(proven_floor)}): pass budget_gb={_ceil_gb(smallest_found)} or more"
        )


def _ceil_gb(nbytes: int) -> str:
    """Return a number of GiB that is at least `nbytes`, in as few digits as come within 0.1 %."""
    digits = max(3, 3 - math.floor(math.log10(gb_from_bytes(max(nbytes, 1)))))
    scale: int = 10**digits
    return f"{-(-nbytes * scale // GIB) / scale:.{digits}f}"
