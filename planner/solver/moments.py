"""Name the moments at which the program writes the budget as a row. Source: docs/formulation.md, (12)."""

from __future__ import annotations

from dataclasses import dataclass

from autoac.planner.problem.graph import Moment
from autoac.planner.solver.recompute_windows import Windows


@dataclass(frozen=True, slots=True)
class DuringForward:
    """The moment at which forward runs `op`."""

    op: int


@dataclass(frozen=True, slots=True)
class DuringStep:
    """The moment at which backward does the work of `step`, after its unpacks."""

    step: int


@dataclass(frozen=True, slots=True)
class DuringBurst:
    """The moment at which the unpack that leads to `state` runs `op` again."""

    state: int
    op: int


ConstrainedMoment = DuringForward | DuringStep | DuringBurst


def states_of(windows: Windows, moment: ConstrainedMoment) -> tuple[int, ...]:
    """Return the states whose columns the row of `moment` has."""
    match moment:
        case DuringForward():
            return ()
        case DuringStep(step):
            return (windows.state_after[step],)
        case DuringBurst(state, _):
            return (state - 1, state)


def position_in_step(windows: Windows, moment: ConstrainedMoment) -> Moment:
    """Return the forward op or the backward step that `moment` is in."""
    n_ops = len(windows.graph.ops)
    match moment:
        case DuringForward(op):
            return Moment(op)
        case DuringStep(step):
            return Moment(n_ops + step)
        case DuringBurst(state, _):
            return Moment(n_ops + windows.unpacks[state - 1][0])


def row_order(moment: ConstrainedMoment) -> tuple[int, int, int]:
    """Return the sort key of `moment`: forward, then steps, then bursts."""
    match moment:
        case DuringForward(op):
            return (0, op, 0)
        case DuringStep(step):
            return (1, step, 0)
        case DuringBurst(state, op):
            return (2, state, op)
