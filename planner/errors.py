"""Errors of the planner.

    PlannerError
    +-- MalformedProfile      the data is not a Profile
    +-- MalformedPolicy       the data is not a Policy
    +-- UnknownVersion        a format of ours, in another version than this release's
    +-- InvalidBudget         not a positive number of bytes
    +-- InvalidLimit          a gap, or a limit on time or work, that no search can keep to
    +-- UnknownOp             a save set names an op that the graph does not have
    +-- OtherProfile          a policy was made for another profile
    +-- InvalidConstraints    constraints that no plan can meet, whatever the budget
    |   +-- UnmatchedPattern      a pattern matches no op or module
    |   +-- ConflictingPins       an op would have to be saved and recomputed
    +-- InfeasibleBudget      no plan fits; says what would
    +-- SolverOutOfTime       a limit on work or time was reached before any plan was found

An error keeps its arguments as fields of the same names. Errors cross ranks, processes and the network as the
dict that `to_dict` returns, and pickle. No other file encodes them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autoac.planner.units import ceil_gb, exact_bytes, format_bytes, printable

_PUBLISHED = {  # names in `to_dict`, where they differ from the argument's
    "message": "detail",
    "budget": "budget_bytes",
    "proven_floor": "proven_floor_bytes",
    "smallest_found": "smallest_found_bytes",
}


class PickledError(Exception):
    """Base of errors that pickle with their text and fields, whatever arguments their constructor takes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_unpickled, (type(self), self.args, self.__dict__))


class PlannerError(PickledError):
    """Base of all errors of the planner."""

    def __init__(self, message: str) -> None:
        super().__init__(message)

    def __str__(self) -> str:
        return printable(super().__str__())  # names in it may be from a file

    def to_dict(self) -> dict[str, Any]:
        """Return the error as JSON data: `kind`, `detail` (its text), and its arguments."""
        data: dict[str, Any] = {"kind": _kind(type(self)), "detail": str(self)}
        for name in _arguments(type(self)) - {"message"}:
            value = getattr(self, name)
            if isinstance(value, tuple):
                value = [asdict(item) if isinstance(item, Holding) else item for item in value]
            data[_PUBLISHED.get(name, name)] = value
        return data


def from_dict(data: Mapping[str, Any]) -> PlannerError | None:
    """Return the error that `to_dict` wrote as `data`; None for other data. Additional keys are ignored."""
    for cls in _subclasses(PlannerError):
        if _kind(cls) == data.get("kind"):
            published = {name: _PUBLISHED.get(name, name) for name in _arguments(cls)}
            given = {name: data[key] for name, key in published.items() if key in data}
            try:
                if "live" in given:
                    given["live"] = [Holding(h["nbytes"], h["name"], h["why"]) for h in given["live"]]
                error: PlannerError = cls(**given)
            except (LookupError, TypeError, ValueError, ArithmeticError):  # an argument is missing or wrong
                return None
            return error
    return None


def _arguments(cls: type) -> set[str]:
    """Return the arguments that `to_dict` writes: not a save set, which means nothing without its graph."""
    return set(inspect.signature(cls).parameters) - {"save_set"}


def _kind(cls: type) -> str:
    """Return the published name of an error class: `infeasible-budget` for InfeasibleBudget."""
    return re.sub("(?<!^)(?=[A-Z])", "-", cls.__name__).lower()


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _unpickled(cls: type[PickledError], args: tuple[Any, ...], state: dict[str, Any]) -> PickledError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class MalformedProfile(PlannerError):
    """The data is not a Profile. `problems` are the first few, a line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("not a valid profile: " + "; ".join(self.problems))


class MalformedPolicy(PlannerError):
    """The data is not a Policy. `problems` are the first few, a line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("not a valid policy: " + "; ".join(self.problems))


class UnknownVersion(PlannerError):
    """The data is in one of our formats, but not in its one version, `known`."""

    def __init__(self, format: str, version: object, known: int) -> None:
        self.format, self.version, self.known = format, version, known
        again = {
            "autoac.profile": "profile the model again with `autoac profile`",
            "autoac.policy": "plan again with `autoac plan`",
            "autoac.policy-set": "plan again with `autoac fit -o`",
        }
        super().__init__(f"{format} must be version {known}, got {version!r}: {again[format]}")


class InvalidBudget(PlannerError):
    """A budget is not a positive, finite number."""


class InvalidLimit(PlannerError):
    """A gap is not a fraction, or a limit is not a number. `name` is the argument."""

    def __init__(self, name: str, value: object, bound: str) -> None:
        self.name, self.value, self.bound = name, value, bound
        super().__init__(f"{name} must be {bound}, got {value!r}")


class UnknownOp(PlannerError):
    """A save set names an op that the graph does not have."""

    def __init__(self, op: int, n_ops: int) -> None:
        self.op, self.n_ops = op, n_ops
        super().__init__(f"op {op} is not in this graph, which has ops 0 to {n_ops - 1}")


class OtherProfile(PlannerError):
    """A policy and a profile do not belong together. `key` is the first op that only one of them has."""

    def __init__(self, policy_model: str, profile_model: str, key: str) -> None:
        self.policy_model, self.profile_model, self.key = policy_model, profile_model, key
        super().__init__(
            f"the policy for {policy_model} was not made for this profile of {profile_model}: only one of "
            f"them has {key!r}; pass the profile that the policy was planned from, or plan again"
        )


class InvalidConstraints(PlannerError):
    """No plan of this profile can meet the constraints, whatever the budget."""


class UnmatchedPattern(InvalidConstraints):
    """A pattern matches no op or module. `near` are names to try instead."""

    def __init__(self, field: str, pattern: str, near: Sequence[str], n_ops: int) -> None:
        self.field, self.pattern, self.near, self.n_ops = field, pattern, tuple(near), n_ops
        advice = f"did you mean {' or '.join(self.near)}?" if self.near else "a policy lists all keys"
        super().__init__(f"{field} {pattern!r} matches none of the {n_ops} ops; {advice}")


class ConflictingPins(InvalidConstraints):
    """An op, or a pattern, would have to be saved and recomputed. `first` and `second` say who asks."""

    def __init__(self, key: str, first: str, second: str) -> None:
        self.key, self.first, self.second = key, first, second
        super().__init__(f"{key} cannot obey both: {first}; {second}. Remove one of the two")


@dataclass(frozen=True, slots=True)
class Holding:
    """Memory that is live at a peak, with its name and the reason why it is held."""

    nbytes: int
    name: str  # an op's key, or a kind of static bytes
    why: str  # "saved", "recomputed", "not planned", ...


MOST_HOLDINGS = 8  # lines of a text
OPTIMIZER_STEP = "optimizer step"  # a moment, in words


def holdings_in_lines(live: Sequence[Holding]) -> list[str]:
    """Return lines of text: one for each of the largest holdings, and one that sums up the others."""
    few, rest = live[:MOST_HOLDINGS], live[MOST_HOLDINGS:]
    lines = [f"  {format_bytes(h.nbytes):>10}  {h.name}  ({h.why})" for h in few]
    if rest:
        lines.append(f"  {format_bytes(sum(h.nbytes for h in rest)):>10}  {len(rest)} more")
    return lines


class InfeasibleBudget(PlannerError):
    """No plan fits in the budget.

    Args:
        budget: in bytes.
        proven_floor: no save set has a smaller peak, in bytes.
        smallest_found: the smallest peak of any plan that was found, in bytes, or None.
        peak_at: the moment of that peak.
        live: what is live there, largest first.
        save_set: the SaveSet with that peak, from which planning within a larger budget of the same profile
            can start. None where another process planned.
        constraints: a line for each kind of constraint under which no plan fits. If forward has a budget of
            its own, the sizes assume that it is raised by as many bytes as the step's budget.
    """

    def __init__(
        self,
        budget: int,
        proven_floor: int,
        smallest_found: int | None,
        peak_at: str,
        live: Sequence[Holding],
        save_set: frozenset[Any] | None = None,
        constraints: Sequence[str] = (),
    ) -> None:
        self.constraints = tuple(constraints)
        self.budget, self.proven_floor, self.smallest_found = budget, proven_floor, smallest_found
        self.save_set = save_set
        self.peak_at, self.live = peak_at, tuple(live)
        needed = smallest_found if smallest_found is not None else proven_floor
        lines = [
            f"No plan fits in {exact_bytes(budget)}: the step needs at least {exact_bytes(proven_floor)} "
            "under every schedule that the planner considers."
        ]
        if smallest_found is not None:
            lines.append(f"The smallest peak found is {exact_bytes(smallest_found)}.")
        if self.live:
            lines.append(f"That peak is at {peak_at}, while these are live:")
            lines += holdings_in_lines(self.live)
        lines.append(
            f"Pass budget_gb={ceil_gb(needed)} or more, or use an optimizer with less state or fewer "
            "temporaries (foreach=False). That peak is the optimizer's, so a smaller batch does not help."
            if peak_at == OPTIMIZER_STEP
            else f"Pass budget_gb={ceil_gb(needed)} or more, or use a smaller batch."
        )
        super().__init__("\n".join([*lines, *self.constraints]))


class SolverOutOfTime(PlannerError):
    """A limit on work or time was reached before any plan within the budget was found.

    Args:
        budget: in bytes.
        time_limit_s: the limit that the caller set; None: only work was limited.
        proven_floor, smallest_found: as of InfeasibleBudget; None where a service planned that does not say.
    """

    def __init__(
        self,
        budget: int,
        time_limit_s: float | None,
        proven_floor: int | None = None,
        smallest_found: int | None = None,
    ) -> None:
        self.budget, self.time_limit_s = budget, time_limit_s
        self.proven_floor, self.smallest_found = proven_floor, smallest_found
        limits = "limit on work" if time_limit_s is None else f"limits on work and time ({time_limit_s:g} s)"
        tried = f"no plan within {format_bytes(budget)} was found within the {limits}, and none was ruled out"
        if smallest_found is None or proven_floor is None:
            super().__init__(f"{tried}; pass a larger budget")
            return
        super().__init__(
            f"{tried}; the smallest peak found is {format_bytes(smallest_found)} (proven bound "
            f"{format_bytes(proven_floor)}): pass budget_gb={ceil_gb(smallest_found)} or more"
        )
