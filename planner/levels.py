"""PROTOTYPE: what a step would need if an op could be run again more than once. Nothing else reads this.

The runtime and `plan()` follow rule "Once": in one backward an op runs again at most once, and its value
stays until its last use. Here each op has a *level* instead, and a save set is the case in which every
unsaved op has level 1. docs/low-budgets.md says what the runtime would have to do.

NOTE [ Levels ]

An op of level 0 is saved. Rules c and d of the schedule (planner/schedule.py) become:

c'. *Burst.* An unpack of a value that is not cached walks back to saved or cached values, as before, and
    what it finds runs in forward order. The walk has a level of its own, which begins at the highest of
    all; going on from an op, it falls to that op's level if that is lower. An op that is reached by a walk of
    at least its own level is *kept*: its value is cached. Any other is in *passing*: its value goes when
    the last op of this burst that reads it has run, and may have to be made again.
d'. *Uses.* A kept value has one use for each saved tensor that shows it and one for each op that will be
    run again and reads it; that op uses it up when it is itself kept, not in passing. An op in whose
    outputs no use is left, and that was never kept, takes its own uses with it (as in rule f).

With two levels this is a checkpoint within a checkpoint: level 1 is what a segment of backward keeps while it
runs, level 2 what one of its parts does. Sources: Chen et al., "Training Deep Nets with Sublinear Memory
Cost" (2016), section 4.3; Griewank and Walther, "Algorithm 799: revolve" (2000).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoac.planner.graph import Graph, HandleId, OpId, StepId, ValueId, closed
from autoac.planner.schedule import (
    Backward,
    Compute,
    Event,
    ForwardMemory,
    Free,
    Recompute,
    held_until,
    uses_of,
)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a choice of levels takes."""

    peak: int  # bytes
    place: int  # moment of the peak
    recompute_us: float
    most_runs: int  # most often that backward runs any op again


def cost(graph: Graph, levels: Sequence[int]) -> Cost:
    """Peak and time of a step in which op `i` has level `levels[i]`. Bytes count as in `simulate`."""
    n = len(graph.ops)
    live = most = graph.static_bytes
    place, at_most, spent = 0, 0, 0.0
    runs = [0] * n
    for event in replay(graph, levels):
        extra = 0
        match event:
            case Compute(op, nbytes):
                place, extra = op, graph.ops[op].workspace + graph.ops[op].other
                live += nbytes
            case Recompute(op, nbytes, step):
                place, extra = n + step, graph.ops[op].workspace + graph.steps[step].other
                live += nbytes
                spent += graph.ops[op].recompute_us
                runs[op] += 1
            case Backward(step):
                place, extra = n + step, graph.steps[step].peak
            case Free(_, nbytes):
                live -= nbytes
        if live + extra > most:
            most, at_most = live + extra, place
    if live + graph.closing_bytes > most:
        most, at_most = live + graph.closing_bytes, graph.end
    return Cost(most, at_most, spent, max(runs, default=0))


def replay(graph: Graph, levels: Sequence[int]) -> Iterator[Event]:
    """The events of one step under NOTE [ Levels ], in order."""
    return _Replay(graph, levels).events()


def anytime_floor(graph: Graph) -> int:
    """Bytes that no choice has less of, however often ops run again: what one moment needs by itself.

    In forward what forward holds; in a step of backward what it has anyway and all that it unpacks at once;
    everywhere what must be saved.
    """
    n = len(graph.ops)
    until = held_until(graph, graph.everything)
    always = closed(graph, frozenset())
    release = [
        max([storage.released, *(graph.values[v].op + 1 for v in storage.values)])
        for storage in graph.storages
    ]
    change = [0] * (graph.end + 2)
    in_step: list[set[ValueId]] = [set() for _ in graph.steps]
    for step in graph.steps:
        newest = {graph.values[v].storage: v for v in sorted(graph.handles[h].value for h in step.unpacks)}
        in_step[step.id] = set(newest.values())  # older versions may be in the same memory
    holds: list[tuple[int, int]] = [(0, 0)] * len(graph.values)  # of its bytes, whatever is chosen
    for storage in graph.storages:
        for v in storage.values:
            last = v == storage.values[-1]
            begin, end = graph.values[v].op, release[storage.id] if last else graph.values[v].op
            if graph.values[v].op in always and last:
                end = max(end, until[v] if graph.values[v].handles else end)
            holds[v] = (begin, end)
        if storage.values:
            first, (_, end) = graph.values[storage.values[0]].op, holds[storage.values[-1]]
            change[first] += storage.nbytes
            change[end] -= storage.nbytes
    live, most = graph.static_bytes, graph.static_bytes + graph.closing_bytes
    for moment in range(graph.end):
        live += change[moment]
        here = live
        if moment < n:
            here += graph.ops[moment].workspace + graph.ops[moment].other
        else:
            here += graph.steps[moment - n].peak
            fresh = {v for v in in_step[moment - n] if not holds[v][0] <= moment < holds[v][1]}
            here += sum(graph.nbytes(v) for v in fresh)
        most = max(most, here)
    return most


class _Replay:
    """State of the replay."""

    def __init__(self, graph: Graph, levels: Sequence[int]) -> None:
        self.graph = graph
        n = len(graph.ops)
        save_set = closed(graph, frozenset(OpId(i) for i in range(n) if levels[i] == 0))
        self.level = [0 if op.id in save_set else max(levels[op.id], 1) for op in graph.ops]
        self.deepest = max(self.level, default=1)
        self.saved = [value.op in save_set for value in graph.values]
        self.cached = [False] * len(graph.values)
        self.passing: dict[ValueId, int] = {}  # readers to come in this burst, of values made in passing
        self.kept = [False] * n  # ops whose uses of what they read are over
        self.pinned: list[ValueId] = []
        self.unpacked: set[HandleId] = set()
        self.left = uses_of(graph, save_set)
        self.forward = ForwardMemory.of(graph, save_set)

    def events(self) -> Iterator[Event]:
        graph, n = self.graph, len(self.graph.ops)
        for op in graph.ops:
            yield from self._frees(op.id)
            yield self.forward.compute(graph, op)
        for step in graph.steps:
            yield from self._frees(n + step.id)
            for h in step.unpacks:
                v = graph.handles[h].value
                if not self.saved[v]:
                    if not self.cached[v]:
                        yield from self._burst(v, step.id)
                    self.left[v] -= h not in self.unpacked
                    self.pinned.append(v)
                self.unpacked.add(h)
            yield Backward(step.id)
            pinned, self.pinned = self.pinned, []
            for v in dict.fromkeys(pinned):
                if not self.left[v] and self.cached[v]:
                    yield self._free(v)
            for h in step.drops:
                if not graph.handles[h].unpacked:
                    yield from self._use(graph.handles[h].value)
        yield from self._frees(graph.end)

    def _frees(self, moment: int) -> Iterator[Event]:
        for v in self.forward.frees_at.get(moment, ()):
            yield Free(v, self.graph.nbytes(v))

    def _free(self, v: ValueId) -> Free:
        self.cached[v] = False
        return Free(v, self.graph.nbytes(v))

    def _walk(self, wanted: ValueId) -> dict[OpId, tuple[int, bool]]:
        """What `wanted` needs: by op the level at which the walk goes on, and whether the op is kept."""
        graph = self.graph
        burst: dict[OpId, tuple[int, bool]] = {}
        stack = [(wanted, self.deepest)]
        while stack:
            v, walk = stack.pop()
            if self.saved[v] or self.cached[v]:
                continue
            op = graph.values[v].op
            on, keep = min(walk, self.level[op]), self.level[op] <= walk
            before = burst.get(op, (-1, False))
            if on > before[0] or (keep and not before[1]):
                burst[op] = (max(on, before[0]), keep or before[1])
                stack += [(r, burst[op][0]) for r in graph.ops[op].reads]
        return burst

    def _burst(self, wanted: ValueId, step: StepId) -> Iterator[Event]:
        """Run what `wanted` needs (rule c')."""
        graph = self.graph
        burst = self._walk(wanted)
        self.passing = {}
        for op_id, (_, keep) in burst.items():
            if not keep:
                self.passing |= dict.fromkeys(graph.ops[op_id].writes, 0)
        for op_id in burst:
            for r in graph.ops[op_id].reads:
                if r in self.passing:
                    self.passing[r] += 1
        for op_id in sorted(burst):
            op, keep = graph.ops[op_id], burst[op_id][1]
            taken = [
                p
                for w in op.writes
                if (p := graph.values[w].previous) is not None and self._may_take(p, keep)
            ]
            nbytes = sum(graph.nbytes(w) for w in op.writes if graph.values[w].previous not in taken)
            for p in taken:
                self.cached[p] = False
            yield Recompute(op.id, nbytes, step, tuple(taken))
            for w in op.writes:
                self.cached[w] = True
            for r in op.reads:
                if r in self.passing:
                    self.passing[r] -= 1
                    if not self.passing[r] and self.cached[r]:
                        yield self._free(r)
            if keep and not self.kept[op_id]:
                self.kept[op_id] = True
                for r in op.reads:
                    yield from self._use(r)
            for w in op.writes:
                # What was made for a reader of this burst stays for it; else what nothing uses goes.
                if self.cached[w] and not (self.passing[w] if w in self.passing else self.left[w]):
                    yield self._free(w)
        self.passing = {}

    def _may_take(self, p: ValueId, keep: bool) -> bool:
        """Whether an in-place op may write into the buffer of version `p` (rule e)."""
        if p in self.passing:
            return self.cached[p] and self.passing[p] == 1
        return keep and self.cached[p] and self.left[p] == 1 and not self.graph.values[p].handles

    def _use(self, v: ValueId) -> Iterator[Event]:
        """One use of `v` less; where none is left, its op needs what it reads no more (rules d' and f)."""
        graph = self.graph
        stack = [v]
        while stack:
            v = stack.pop()
            if self.saved[v]:
                continue
            self.left[v] -= 1
            if not self.left[v] and self.cached[v] and v not in self.pinned and v not in self.passing:
                yield self._free(v)
            op = graph.ops[graph.values[v].op]
            if not self.kept[op.id] and not any(self.left[w] for w in op.writes):
                self.kept[op.id] = True
                stack.extend(op.reads)
