"""Bound the time of recomputes from below, for every schedule: any op may run again, at any time.

NOTE [ One moment ]

Look at the first run of op k. What is live then must fit. What was written before, is not live and is read
later has to be written again, from what is live or by further recomputes:

    s[v]  value v is live at k     bytes that op k needs + sum of nbytes * s <= budget
    r[o]  op o runs again after k  s[v] + r[op of v] >= 1    if op k + 1 or a later one reads v
                                   s[v] + r[op of v] >= r[o] if op o < k reads v

Every schedule that the checker accepts satisfies this, so the least sum of us * r is a bound, also without
integers. It is one knapsack over the whole model, and no more is needed: for a training step whose peak is
near the beginning of backward it is within a percent of our plans.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from benchmarks.public.step_graph import StepGraph

STRETCHES = 40  # of backward
EARLY, HEAVY = 8, 8  # moments: the ops with most bytes, in the first stretches and in all of backward


def least_again_us(graph: StepGraph, budget: int) -> float:
    """Return the largest bound of a few moments; infinite if no schedule fits."""
    n, count = graph.forward_ops, len(graph.ops) - graph.forward_ops
    cuts = [n + count * i // STRETCHES for i in range(STRETCHES + 1)]

    def nbytes(k: int) -> int:
        return graph.ops[k].first_bytes + graph.ops[k].workspace_bytes

    early = [max(range(a, b), key=nbytes) for a, b in pairwise(cuts[: EARLY + 1]) if a < b]
    moments = {n, *early, *sorted(range(n, len(graph.ops)), key=nbytes)[-HEAVY:]}
    return max(least_again_us_after(graph, budget, k) for k in sorted(moments))


def least_again_us_after(graph: StepGraph, budget: int, k: int) -> float:
    """Return the bound of what runs again after the first run of op `k`; infinite if no schedule fits."""
    at, written = graph.ops[k], sum(len(graph.writes[o]) for o in range(k))
    overwritten = {value.previous for value in graph.values}
    values = graph.values[:written]
    needed = {v for op in graph.ops[k + 1 :] for v in op.reads} | set(graph.keep)
    held = [
        v in at.reads or (value.held_until > k and v not in overwritten) for v, value in enumerate(values)
    ]
    lower = np.concatenate([np.array(held, float), np.zeros(k)])
    upper = np.concatenate([np.ones(written), [float(op.repeatable) for op in graph.ops[:k]]])
    costs = np.concatenate([np.zeros(written), [op.us for op in graph.ops[:k]]])

    # A row for each need: s[v] + r[op of v] >= 1, or >= r[reader].
    pairs = [(v, -1) for v in sorted(needed) if v < written]
    pairs += [(v, o) for o in range(k) if graph.ops[o].repeatable for v in graph.ops[o].reads]
    v, reader = np.array(pairs, int).reshape(-1, 2).T
    row, again = np.arange(len(pairs)), reader >= 0
    writer = np.array([value.op for value in values], int)[v]
    unit = max([1, *(value.nbytes for value in values)])
    rows = np.concatenate([row, row, row[again], np.full(written, len(pairs))])
    columns = np.concatenate([v, written + writer, written + reader[again], np.arange(written)])
    numbers = np.concatenate(
        [np.full(2 * len(pairs), -1.0), np.ones(again.sum()), [value.nbytes / unit for value in values]]
    )
    matrix = coo_array((numbers, (rows, columns)), (len(pairs) + 1, written + k)).tocsr()
    used = graph.static_bytes + at.first_bytes + at.workspace_bytes
    used += sum(graph.values[w].nbytes for w in graph.writes[k] if graph.values[w].previous is None)
    limits = np.append(np.where(again, 0.0, -1.0), (budget - used) / unit)
    scale = max(costs.max(initial=0.0), 1e-9)
    found = linprog(
        costs / scale, A_ub=matrix, b_ub=limits, bounds=np.stack([lower, upper], 1), method="highs"
    )
    if found.status == 2:
        return float("inf")
    if found.status != 0:
        raise RuntimeError(f"HiGHS must solve the bound of {graph.name} at op {k}, got: {found.message}")
    return float(found.fun * scale)
