"""Explain why no plan fits: the evidence of a failed search, and the constraints under which it failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from autoac.planner.errors import Holding, InfeasibleBudget
from autoac.planner.formats.constraints import Constraints
from autoac.planner.memory.lifetimes import live_at_peak
from autoac.planner.memory.simulate import instant_name, peak_of
from autoac.planner.minimum_peak import MinimumPeak
from autoac.planner.problem.graph import Graph
from autoac.planner.units import format_bytes


def infeasible(graph: Graph, budget: int, smallest: MinimumPeak) -> InfeasibleBudget:
    """Return the error for a budget that no plan fits in, with what is live at the smallest peak found."""
    at = instant_name(graph, peak_of(graph, smallest.save_set))
    live = live_at_peak(graph, smallest.save_set)
    return InfeasibleBudget(budget, smallest.proven, smallest.found, at, live, smallest.save_set)


def with_constraints(
    error: InfeasibleBudget, constraints: Constraints, forward: int | None
) -> InfeasibleBudget:
    """Return `error` with a line for each kind of constraint under which no plan fits; else `error` itself.

    Args:
        error: from planning `with_forward_limit(constrained(...))`.
        constraints: under which it was planned.
        forward: the limit of forward in bytes, headroom taken off.
    """
    lines, live = [], list(error.live)
    if forward is not None and forward < error.budget:
        reserve = error.budget - forward
        live = list(_without_reserve(live, reserve, error.peak_at))
        lines.append(
            f"Forward may hold {format_bytes(forward)} (forward_budget_bytes). These sizes are for both "
            f"limits raised alike, {format_bytes(reserve)} apart."
        )
    if constraints.pins:
        given = constraints.model_dump(include={"pin_save", "pin_recompute", "fsdp_units"})
        named = (f"{field} {pattern!r}" for field, patterns in given.items() for pattern in patterns)
        lines.append(f"Without these pins a plan may fit: {', '.join(named)}.")
    if not lines:
        return error
    return InfeasibleBudget(
        error.budget, error.proven_floor, error.smallest_found, error.peak_at, live, error.save_set, lines
    )


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
