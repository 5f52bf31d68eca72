"""Run HiGHS through PuLP, and report why it stopped apart from the candidate that it found.

Only this module knows HiGHS. PuLP's own HiGHS class adds columns and rows one by one and reports a time-out
with an incumbent as "Optimal" (PuLP 3.3.2). So `_Highs` passes columns and rows as arrays, and the status is
read from HiGHS itself.

NOTE [ Work ]

A limit in seconds gives another answer on a slower or busier machine. So effort is counted in *units of
work*, about a second of one core each, from counts of HiGHS that do not depend on a clock:

- for a program without integers, simplex iterations (`simplex_iteration_limit`);
- for a program with integers, simplex iterations too. HiGHS reports them only at the end, so until then the
  limit counts how often branch and bound checks its limits, where HiGHS calls back
  (`kCallbackMipInterrupt`): after a round of cuts, a heuristic, a node.

An iteration is weighed by the nonzeros of the program. Between two checks, HiGHS solves the relaxation again,
with changes, so a check is weighed by what the relaxation took (`check_work`). Where that took long, the
changes take more than in proportion: on an unrolled LSTM, a round of cuts takes longer than the relaxation.
After the root node, a check takes a quarter (`NODE_SHARE`). Iterations are within a factor of two of the CPU
time, checks within four; the same program always takes the same work. HiGHS has no other limit that is a
count and is checked within the root node, where most of our time goes: so a program whose root node would
take more than the work that is left is not begun (`Round.root_is_too_dear` in efforts.py). For neighborhoods,
`mip_max_nodes` is used in addition.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import highspy
import numpy as np
import numpy.typing as npt
import pulp
from pulp.apis import _all_solvers

# PuLP keeps the errors of solvers that it cannot load, and their tracebacks keep the frames of the code that
# imported this module first: a training loop with its model, since packages load at first use.
for _solver in _all_solvers:
    if isinstance(_error := getattr(_solver, "err", None), BaseException):
        _error.__traceback__ = None


def _make_first_highs() -> None:
    """Make the first `Highs` of this process without stdout: that of 1.16 prints two lines from C."""
    try:
        stdout = os.dup(1)
    except OSError:  # it is closed
        return
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        highspy.Highs()
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(null)


_make_first_highs()  # as this module is imported, under the lock of imports: once, and before any other

SEED = 20261121
THREADS = 1  # the same number in the whole process, or HiGHS raises an error

# Units of work.
SOLVE = 0.01
# The same, for each nonzero of a program.
BUILD = 1e-6  # with presolve, and the simulation of the candidate
SIMPLEX_ITERATION = 1e-9
MIP_ITERATION = 1e-8  # and in addition,
MIP_ITERATION_AT_LEAST = 4e-4  # for each iteration
MIP_CHECK = 5e-7
NODE_SHARE = 0.25  # of a check's work, after the root node
CHECK_SHARE = 0.2  # see `check_work`
FEW_CHECKS = 2  # of presolve, which takes little
MOST_ITERATIONS = 2**31 - 1  # the largest value that HiGHS accepts

Spend = Callable[[float], None]
"""A function that counts units of work, and raises an error if there are none left."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


class Stopped(StrEnum):
    """The reason why the solver stopped, with or without a candidate."""

    OPTIMAL = "optimal"  # proven, within the requested gap
    TARGET = "target"  # a candidate as good as requested
    INFEASIBLE = "infeasible"  # proven
    WORK_LIMIT = "work limit"  # a count: the same on every machine
    TIME_LIMIT = "time limit"  # of the caller, in seconds: another machine may get further
    FEW_VARIANTS = (
        "few variants"  # blocks that share compiled code may not differ more: planner/shared_code.py
    )
    INTERRUPTED = "interrupted"  # by the progress callback
    FAILED = "failed"  # numerical trouble


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a search: the best plan and what is proven. `gap` is relative, infinite without a plan."""

    primal: float
    dual: float
    gap: float
    seconds: float  # of the solver's own clock
    point: int = 0  # of a frontier: the number of the plan, from 1; 0 for the smallest peak or a single plan
    points: int = 0  # of a frontier: how many plans


OnProgress = Callable[[Progress], bool | None]
"""Called while solving; returning True stops the solver."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Linear rows `lower <= A x <= upper`, `A` in compressed sparse rows."""

    starts: Ints
    columns: Ints
    coefficients: Floats
    lower: Floats
    upper: Floats

    def __len__(self) -> int:
        return len(self.lower)

    @property
    def of_term(self) -> npt.NDArray[np.int64]:
        """Return for each term (nonzero coefficient) the index of its row."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    def activity(self, values: Floats) -> Floats:
        """Return `A x` for the columns' `values`."""
        terms = self.coefficients * values[self.columns]
        return np.bincount(self.of_term, terms, len(self)).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A mixed-integer program: minimise `costs @ x` over `rows` and `lower <= x <= upper`."""

    costs: Floats
    lower: Floats
    upper: Floats
    integer: Bools
    rows: Rows
    # No bound above this cost is proven, which is less work. As a row, it would take several times as long:
    # HiGHS centers in what the rows leave, which is nearly nothing then.
    cutoff: float = math.inf

    @property
    def n_columns(self) -> int:
        """Return the number of columns."""
        return len(self.costs)

    def priced_out(self, relaxed: Outcome, slack: float) -> Program:
        """Return the program with the columns fixed that cost more than `slack` to move from the relaxation.

        (15) A solution that costs at most `slack` more than the relaxation moves none of these columns
        (reduced cost fixing; L. Wolsey, "Integer Programming", section 7.3).
        """
        assert relaxed.values is not None
        assert relaxed.reduced_costs is not None
        dear = slack * (1 + 1e-6) + 1e-9
        low = (relaxed.reduced_costs > dear) & (relaxed.values <= self.lower + 1e-9)
        high = (relaxed.reduced_costs < -dear) & (relaxed.values >= self.upper - 1e-9)
        return replace(
            self, lower=np.where(high, self.upper, self.lower), upper=np.where(low, self.lower, self.upper)
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Why the solver stopped, and the candidate that it found."""

    stopped: Stopped
    values: Floats | None  # of the candidate, by column; None without a candidate
    objective: float | None  # of the candidate
    bound: float  # proven lower bound of the cost: -inf if nothing is proven, +inf if infeasible
    seconds: float  # HiGHS's own run time
    work: float  # units of work that it took
    reduced_costs: Floats | None = None  # of a program without integers: the cost of moving a column


def check_work(relaxed_work: float) -> float:
    """Return the units of work from one check of branch and bound to the next, by those of the relaxation."""
    return CHECK_SHARE * relaxed_work * (1 + relaxed_work)


class _Meter:
    """Count the work of one solve, in units that do not depend on the machine. See NOTE [ Work ]."""

    def __init__(self, nonzeros: int, linear: bool, limit: float, relaxed_work: float) -> None:
        self._nonzeros, self._linear, self._limit = max(nonzeros, 1), linear, limit
        self._checks, self._each_check = 0.0, MIP_CHECK + check_work(relaxed_work) / self._nonzeros
        left = (limit - SOLVE) / self._nonzeros - BUILD
        most = left / SIMPLEX_ITERATION if linear else FEW_CHECKS + left / self._each_check
        self.most = int(min(max(most, 0), MOST_ITERATIONS))  # iterations, or checks

    def check(self, nodes: int) -> bool:
        """Count a check that branch and bound makes of its limits; return True if it was one too many."""
        self._checks += NODE_SHARE if nodes else 1
        return self.exhausted

    @property
    def exhausted(self) -> bool:
        return self._checks > self.most

    def work(self, iterations: int) -> float:
        """Return the work of the solve so far. If the work limit ended the solve, return the limit."""
        if self.exhausted or (self._linear and iterations >= self.most):
            return self._limit
        each = self._nonzeros * (SIMPLEX_ITERATION if self._linear else MIP_ITERATION)
        each += 0 if self._linear else MIP_ITERATION_AT_LEAST
        return SOLVE + self._nonzeros * BUILD + each * iterations


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """Pass columns and rows to HiGHS as arrays, where pulp.HiGHS adds them one by one."""

    def __init__(self, program: Program, start: Floats | None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._program = program
        self._start = start

    def buildSolverModel(self, lp: pulp.LpProblem) -> None:
        model, program, rows = lp.solverModel, self._program, self._program.rows
        model.addCols(
            program.n_columns,
            program.costs,
            program.lower,
            program.upper,
            0,
            np.zeros(program.n_columns, np.int32),
            np.empty(0, np.int32),
            np.empty(0, np.float64),
        )
        integer = np.flatnonzero(program.integer).astype(np.int32)
        if self.mip and len(integer):
            model.changeColsIntegrality(
                len(integer), integer, np.full(len(integer), highspy.HighsVarType.kInteger)
            )
        model.addRows(
            len(rows),
            rows.lower,
            rows.upper,
            len(rows.columns),
            rows.starts[:-1],
            rows.columns,
            rows.coefficients,
        )
        if self._start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = [float(x) for x in self._start]
            solution.value_valid = True
            model.setSolution(solution)

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:
        return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound  # read from HiGHS instead: see solve


def solve(
    program: Program,
    *,
    time_limit_s: float = math.inf,
    work_limit: float = math.inf,
    gap: float = 0.0,
    target: float | None = None,
    start: Floats | None = None,
    progress: Callable[[float], bool] | None = None,
    relaxed: bool = False,
    relaxed_work: float = 0.0,
    options: Mapping[str, Any] | None = None,
) -> Outcome:
    """Minimise `program` deterministically, with one thread and a fixed seed. See NOTE [ Work ].

    Args:
        program: what to solve.
        time_limit_s: seconds of HiGHS's own clock.
        work_limit: units of work.
        gap: stop once at most this share of the candidate's cost is not proven to be necessary.
        target: stop at a candidate that costs no more than this.
        start: a feasible assignment to start from.
        progress: called now and then with the seconds so far; returning True stops the solver.
        relaxed: ignore that variables are integer.
        relaxed_work: units of work that the program takes with `relaxed`, if known; it weighs checks.
        options: further options of HiGHS.
    """
    linear = relaxed or not program.integer.any()
    meter = _Meter(len(program.rows.columns), linear, work_limit, relaxed_work)
    hooks: dict[str, Any] = {} if target is None else {"objective_target": target}
    if not linear:
        hooks["objective_bound"] = program.cutoff
    if linear and math.isfinite(work_limit):
        hooks["simplex_iteration_limit"] = meter.most
    if not linear and (progress is not None or math.isfinite(work_limit)):

        def on_callback(kind: Any, message: str, out: Any, into: Any, _data: Any) -> None:
            is_over = meter.check(out.mip_node_count)
            if is_over or (progress is not None and progress(out.running_time)):
                into.user_interrupt = True

        hooks |= {
            "callbackTuple": (on_callback, None),
            "callbacksToActivate": [highspy.cb.HighsCallbackType.kCallbackMipInterrupt],
        }
    solver = _Highs(
        program,
        start,
        mip=not relaxed,
        msg=False,
        threads=THREADS,
        timeLimit=max(time_limit_s, 0.0),
        gapRel=gap,
        gapAbs=1e-9,
        random_seed=SEED,
        **hooks,
        **(options or {}),
    )
    problem = pulp.LpProblem("plan", pulp.LpMinimize)  # carries the options; columns and rows go as arrays
    solver.createAndConfigureSolver(problem)
    solver.buildSolverModel(problem)
    solver.callSolver(problem)
    model = problem.solverModel
    problem.solverModel = None
    return _outcome(model, linear, meter)


def _outcome(model: Any, linear: bool, meter: _Meter) -> Outcome:
    status, info = model.getModelStatus(), model.getInfo()
    kinds = highspy.HighsModelStatus
    stopped = {
        kinds.kOptimal: Stopped.OPTIMAL,
        kinds.kModelEmpty: Stopped.OPTIMAL,
        kinds.kObjectiveTarget: Stopped.TARGET,
        kinds.kInfeasible: Stopped.INFEASIBLE,
        kinds.kUnboundedOrInfeasible: Stopped.INFEASIBLE,  # costs are not negative: never unbounded
        kinds.kTimeLimit: Stopped.TIME_LIMIT,
        kinds.kIterationLimit: Stopped.WORK_LIMIT,
        kinds.kSolutionLimit: Stopped.WORK_LIMIT,  # of nodes
        kinds.kInterrupt: Stopped.WORK_LIMIT if meter.exhausted else Stopped.INTERRUPTED,
    }.get(status, Stopped.FAILED)
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = np.array(model.getSolution().col_value, np.float64) if feasible else None
    objective = float(info.objective_function_value) if feasible else None
    if stopped is Stopped.INFEASIBLE:
        bound = np.inf
    elif linear:
        bound = objective if objective is not None and stopped is Stopped.OPTIMAL else -np.inf
    else:
        bound = float(info.mip_dual_bound)
    reduced_costs = np.array(model.getSolution().col_dual, np.float64) if linear and feasible else None
    work = meter.work(max(info.simplex_iteration_count, 0))
    return Outcome(stopped, values, objective, float(bound), float(model.getRunTime()), work, reduced_costs)
