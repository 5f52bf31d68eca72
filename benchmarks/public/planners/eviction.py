"""Evict values when memory runs out and recompute them on demand: DTR, and least recently used.

M. Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021. An online planner sees one op at a time. To
run an op it first makes its inputs live again, then evicts values until the outputs fit. DTR evicts the value
with the least h = cost / (size * staleness). The cost of a value includes that of the evicted values next to
it, as kept in equivalence classes (h_DTR^eq of the paper, which its prototype in PyTorch uses). A value that
the step reads no more is evicted at once ("eager eviction"), and may be recomputed if a recompute needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.public.step_graph import Event, NoSchedule, Planner, StepGraph

THRASHING = 3.0  # give up once recomputes take this many steps' time


class _Classes:
    """Disjoint sets of evicted values with the sum of their costs; a set cannot be split."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))
        self._cost = [0.0] * count

    def root(self, v: int) -> int:
        while self._parent[v] != v:
            self._parent[v] = v = self._parent[self._parent[v]]
        return v

    def cost(self, root: int) -> float:
        return self._cost[root]

    def add(self, v: int, us: float, neighbors: Iterator[int]) -> None:
        """Make a set of `v` alone, and merge it with the sets of its evicted neighbors."""
        self._parent[v], self._cost[v] = v, us
        for neighbor in neighbors:
            mine, other = self.root(v), self.root(neighbor)
            if mine != other:
                self._parent[other] = mine
                self._cost[mine] += self._cost[other]

    def remove(self, v: int, us: float) -> int:
        """Subtract the cost of `v` from its set, and return the set's root."""
        root = self.root(v)
        self._cost[root] -= us
        return root


class _Runtime:
    """The state of one run."""

    def __init__(self, graph: StepGraph, budget: int, score: Callable[[_Runtime, int], float]) -> None:
        self.graph, self.budget, self.score = graph, budget, score
        values = len(graph.values)
        self.events: list[Event] = []
        self.reached = 0  # first runs so far
        self.held = graph.static_bytes
        self.live = [False] * values
        self.evicted = [False] * values
        self.locks = [0] * values
        self.pool: set[int] = set()  # live values
        self.clock, self.again_us = 0.0, 0.0
        self.last_access = [0.0] * values
        self.nodes = list(range(values))  # the node of each value in `classes`
        self.classes = _Classes(values)
        self.left = [sum(1 for _ in readers) for readers in graph.readers]  # reads by first runs to come
        self.needed = graph.needed_until
        self.waiting: dict[int, list[int]] = {}  # values to evict once so many first runs are over
        self.keep = set(graph.keep)

    def us(self, v: int) -> float:
        return self.graph.ops[self.graph.values[v].op].us

    def neighbors(self, v: int) -> Iterator[int]:
        """Yield evicted values that `v` is computed from, or that are computed from `v`."""
        graph = self.graph
        for u in graph.ops[graph.values[v].op].reads:
            if self.evicted[u]:
                yield u
        for reader in graph.readers[v]:
            for w in graph.writes[reader]:
                if self.evicted[w]:
                    yield w

    def run(self) -> list[Event]:
        for number in range(len(self.graph.ops)):
            self._execute(number)
            self._release(number)
        for v in self.graph.keep:
            if not self.live[v]:
                self._execute(self.graph.values[v].op)
            self.locks[v] += 1
        return self.events

    def _execute(self, target: int) -> None:
        """Run an op, after the ops that its missing inputs need; each op below it on the stack waits."""
        stack: list[tuple[int, list[int]]] = [(target, self._lock(target))]
        while stack:
            number, missing = stack[-1]
            while missing and self.live[missing[-1]]:
                self.locks[missing.pop()] += 1
            if missing:
                needed = self.graph.values[missing[-1]].op
                stack.append((needed, self._lock(needed)))
                continue
            stack.pop()
            self._compute(number)
            for v in self.graph.ops[number].reads:
                self.locks[v] -= 1

    def _lock(self, number: int) -> list[int]:
        """Lock the live inputs of an op, and return the others, last one first."""
        missing = []
        for v in self.graph.ops[number].reads:
            self.last_access[v] = self.clock
            if self.live[v]:
                self.locks[v] += 1
            else:
                missing.append(v)
        return missing[::-1]

    def _compute(self, number: int) -> None:
        graph, op = self.graph, self.graph.ops[number]
        first = number == self.reached
        over = self._overwritten(number) if first else ()
        outputs = sum(graph.values[w].nbytes for w in graph.writes[number])
        freed = sum(graph.values[p].nbytes for p in over)
        extra = op.first_bytes if first else self._before_bytes()
        self._make_room(outputs - freed + op.workspace_bytes + extra)
        self.events.append(("compute", number, over) if over else ("compute", number))
        for p in over:
            self._forget(p)
        self.clock += op.us
        self.reached += first
        if not first:
            self.again_us += op.us
            if self.again_us > THRASHING * graph.us:
                raise NoSchedule(f"thrashes: more than {THRASHING:g} steps of recompute")
        for w in graph.writes[number]:
            self.last_access[w] = self.clock
            if not self.live[w]:
                self.live[w] = True
                self.held += graph.values[w].nbytes
                self.pool.add(w)
            if self.evicted[w]:
                self.evicted[w] = False
                self.classes.remove(w, self.us(w))

    def _before_bytes(self) -> int:
        return self.graph.ops[self.reached].before_bytes if self.reached < len(self.graph.ops) else 0

    def _overwritten(self, number: int) -> tuple[int, ...]:
        """Return the values that an in-place op may write over: nothing in the step reads them later."""
        found = (self.graph.values[w].previous for w in self.graph.writes[number])
        return tuple(
            p
            for p in found
            if p is not None
            and self.left[p] == 1
            and self.locks[p] == 1
            and p not in self.keep
            and (self._repeatable(p) or self.needed[p] <= number)
        )

    def _repeatable(self, v: int) -> bool:
        return self.graph.ops[self.graph.values[v].op].repeatable

    def _make_room(self, nbytes: int) -> None:
        while self.held + nbytes > self.budget:
            candidates = [v for v in self.pool if not self.locks[v] and self._may_evict(v)]
            if not candidates:
                raise NoSchedule("out of memory: nothing left to evict")
            self._evict(min(candidates, key=lambda v: (self.score(self, v), v)))

    def _may_evict(self, v: int) -> bool:
        value = self.graph.values[v]
        return bool(value.nbytes) and self._repeatable(v) and value.held_until <= self.reached

    def _evict(self, v: int) -> None:
        self.events.append(("free", v))
        self._forget(v)

    def _forget(self, v: int) -> None:
        self.live[v] = False
        self.held -= self.graph.values[v].nbytes
        self.pool.discard(v)
        self.classes.add(v, self.us(v), self.neighbors(v))
        self.evicted[v] = True

    def _release(self, number: int) -> None:
        """Evict what nothing in the step reads after the first run of op `number`."""
        graph = self.graph
        for v in graph.ops[number].reads:
            self.left[v] -= 1
        over = [v for v in (*graph.ops[number].reads, *graph.writes[number]) if not self.left[v]]
        for v in over + self.waiting.pop(self.reached, []):
            if v in self.keep or not self.live[v]:
                continue
            until = graph.values[v].held_until
            if not self._repeatable(v):
                until = max(until, self.needed[v] + 1)
            if until > self.reached:
                self.waiting.setdefault(until, []).append(v)
            else:
                self._evict(v)


def _dtr(runtime: _Runtime, v: int) -> float:
    staleness = runtime.clock - runtime.last_access[v]
    if staleness <= 0:
        return float("inf")
    roots = {runtime.classes.root(u) for u in runtime.neighbors(v)}
    us = runtime.us(v) + sum(runtime.classes.cost(root) for root in roots)
    return us / (runtime.graph.values[v].nbytes * staleness)


def _lru(runtime: _Runtime, v: int) -> float:
    return runtime.last_access[v]


def _planner(score: Callable[[_Runtime, int], float]) -> Planner:
    return lambda graph, budget: _Runtime(graph, budget, score).run()


dtr, lru = _planner(_dtr), _planner(_lru)
