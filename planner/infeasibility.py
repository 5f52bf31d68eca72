"""Explain why no plan fits: the evidence of a failed search, and the constraints to blame for it.

    budget, MinimumPeak --infeasible--> InfeasibleBudget --with_blame--> InfeasibleConstraints

The evidence is data (`Blame`); `blame_in_words` writes the sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from autoac.planner.errors import Holding, InfeasibleBudget, InfeasibleConstraints
from autoac.planner.formats.constraints import Constraints
from autoac.planner.formats.profile import Profile
from autoac.planner.memory.lifetimes import live_at_peak
from autoac.planner.memory.simulate import instant_name, peak_bytes, peak_of
from autoac.planner.minimum_peak import MinimumPeak
from autoac.planner.problem.apply_constraints import constrained, with_forward_limit
from autoac.planner.problem.graph import Graph
from autoac.planner.solver.arrays import as_arrays
from autoac.planner.solver.bounds import bounds
from autoac.planner.solver.recompute_windows import find_windows
from autoac.planner.solver.start.segments import Segments
from autoac.planner.units import format_bytes

MOST_REASONS = 8  # that a text names


@dataclass(frozen=True, slots=True)
class PinnedBytes:
    """Ops that one pin saves, and the bytes that they hold at one moment whatever else is decided."""

    reason: str  # "pin_save 'model.layers.*'"
    n_ops: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Blame:
    """The constraints without which a plan might fit. Empty where they make no difference."""

    forward_limit: int | None = None  # bytes; None if forward may use the whole budget
    peak_without_limit: int | None = None  # of a plan that fits if forward has no limit
    reserve: int = 0  # bytes between the budget and forward's limit
    pins_at: str = ""  # the moment of `pins`
    pins: tuple[PinnedBytes, ...] = ()  # the most bytes first
    n_pinned_to_recompute: int = 0  # ops


def infeasible(graph: Graph, budget: int, smallest: MinimumPeak) -> InfeasibleBudget:
    """Return the error for a budget that no plan fits in, with what is live at the smallest peak found."""
    at = instant_name(graph, peak_of(graph, smallest.save_set))
    live = live_at_peak(graph, smallest.save_set)
    return InfeasibleBudget(budget, smallest.proven, smallest.found, at, live, smallest.save_set)


def with_blame(
    error: InfeasibleBudget, profile: Profile | Graph, constraints: Constraints, forward: int | None
) -> InfeasibleBudget:
    """Return `error` with the constraints to blame for it; `error` itself where there are none.

    Args:
        error: from planning `with_forward_limit(constrained(...))`.
        profile, constraints: what was planned.
        forward: the limit of forward in bytes, headroom taken off.
    """
    blame = find_blame(error, profile, constraints, forward)
    lines = list(blame_in_words(blame))
    if not lines:
        return error
    live = list(_without_reserve(error.live, blame.reserve, error.peak_at)) if blame.reserve else error.live
    return InfeasibleConstraints(
        error.budget, error.proven_floor, error.smallest_found, error.peak_at, live, lines, error.save_set
    )


def find_blame(
    error: InfeasibleBudget, profile: Profile | Graph, constraints: Constraints, forward: int | None
) -> Blame:
    """Return which constraints are to blame for `error`. Arguments as of `with_blame`.

    A constraint is to blame where the proven bound exceeds the budget with it and not without, or where a
    save set of segments would fit without it.
    """
    graph, budget = constrained(profile, constraints), error.budget
    blame = Blame()
    if forward is not None and forward < budget:
        peak = peak_found(graph)
        blame = Blame(forward, peak if peak <= budget else None, budget - forward)
    if constraints.pins:
        unpinned = {"pin_save": (), "pin_recompute": (), "fsdp_units": ()}
        free = constrained(profile, constraints.model_copy(update=unpinned))
        loose = with_forward_limit(free, budget, forward)
        known = bounds(with_forward_limit(graph, budget, forward))
        if known.floor > budget >= bounds(loose).floor or peak_found(loose) <= budget:
            pins = _pinned_bytes(graph, free, known.floor_at)
            n_recompute = sum(op.must_recompute and not free.ops[op.id].must_recompute for op in graph.ops)
            at = graph.moment_name(known.floor_at)
            blame = replace(blame, pins_at=at, pins=pins, n_pinned_to_recompute=n_recompute)
    return blame


def blame_in_words(blame: Blame) -> Iterator[str]:
    """Yield a line for each constraint that makes the budget infeasible, with the memory that it takes."""
    if blame.forward_limit is not None:
        if blame.peak_without_limit is not None:
            yield (
                f"Forward may hold {format_bytes(blame.forward_limit)} (forward_budget_bytes): without that "
                f"a plan with a peak of {format_bytes(blame.peak_without_limit)} fits."
            )
        yield f"These sizes are for both limits raised alike, {format_bytes(blame.reserve)} apart."
    if blame.pins:
        total = format_bytes(sum(pin.nbytes for pin in blame.pins))
        yield f"Pins alone hold {total} at {blame.pins_at}:"
        for pin in blame.pins[:MOST_REASONS]:
            yield f"  {format_bytes(pin.nbytes):>10}  {pin.n_ops} ops  ({pin.reason})"
    if blame.n_pinned_to_recompute:
        n = blame.n_pinned_to_recompute
        yield f"pin_recompute has {n} ops recomputed, whose outputs are live from their first use on."


def peak_found(graph: Graph) -> int:
    """Return the smallest peak that is found without a search: of segments, or with nothing recomputed."""
    save_sets = chain([graph.everything], Segments(as_arrays(find_windows(graph))).smallest())
    return min(peak_bytes(graph, save_set) for save_set in save_sets)


def _pinned_bytes(graph: Graph, free: Graph, moment: int) -> tuple[PinnedBytes, ...]:
    """Return what the ops that only `graph` must save hold at `moment`, by the pin that asks for it.

    Bytes that forward itself would hold at that moment count as well.
    """
    dropped = find_windows(graph).dropped
    nbytes, count = Counter[str](), Counter[str]()
    for op in graph.ops:
        if op.must_save and not free.ops[op.id].must_save:
            count[op.must_save] += 1
            nbytes[op.must_save] += sum(graph.nbytes(w) for w in op.writes if op.id <= moment < dropped[w])
    worst = sorted(count, key=lambda reason: -nbytes[reason])
    return tuple(PinnedBytes(reason, count[reason], nbytes[reason]) for reason in worst)


def _without_reserve(live: Iterable[Holding], reserve: int, peak_at: str) -> Iterator[Holding]:
    """Yield `live`, at a peak of `with_forward_limit`, with forward's reserve as an entry of its own."""
    in_forward = peak_at.endswith(", forward")
    for holding in live:
        if in_forward and holding.name == "gradients, temporaries and workspace":
            yield Holding(reserve, "what forward must leave free", "forward_budget_bytes")
            if holding.nbytes > reserve:
                yield replace(holding, nbytes=holding.nbytes - reserve)
        else:
            yield holding
