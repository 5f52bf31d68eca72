"""The events of one training step under a save set.

NOTE [ Rules of the schedule ]

The runtime and this module follow the same rules (docs/memory-model.md says them in full):

a. *Hold.* A saved value is held from the op that wrote it if autograd packed it or an op of the
   recompute set reads it, else not at all. It is held until autograd has dropped its last saved tensor
   and the last saved tensor of any unsaved value that is computed from it, and in forward for as long
   as forward itself holds such a value, since it may yet be packed. What autograd holds is the storage,
   with whatever is written to it later.
b. *Write over a held value.* If an in-place op writes over a saved value that an op of the recompute set
   has read and will read again, a private copy of the old version is made first, and held for that op.
c. *Burst.* An unpack of an unsaved value that is not cached runs the ops it needs, found by walking the
   reads back to saved or cached values, in forward order.
d. *Uses.* An unsaved value has one use for each saved tensor that shows it and one for each op that will
   be run again and reads it. The first unpack of a saved tensor uses one up, so does an op that has
   read it. At no uses left it is freed: after the op that read it last, or at the end of the step that
   unpacked it. An output of a recomputed op that has no uses is freed as soon as the op has run.
e. *In place again.* An in-place op that is run again writes into the buffer of the old version if it is
   that version's only use left and no saved tensor ever showed it, else into a fresh copy.
f. *Never unpacked.* A saved tensor that is dropped without having been unpacked takes its use with it,
   and an op of which no output has a use left takes its own.
g. *Unpacked again.* A saved tensor that a later step unpacks again, when its uses are over and the value is
   gone, has what it needs run in passing: no use is counted, in-place ops write into copies, and when the
   burst is over all goes but the value asked for, which goes at the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoac.planner.errors import UnknownOp
from autoac.planner.problem.graph import Graph, Op, OpId, SavedTensorId, SaveSet, StepId, VersionId
from autoac.planner.problem.save_sets import recomputed_by_backward, with_forced_saves


@dataclass(frozen=True, slots=True)
class Compute:
    """Forward runs an op, which allocates `nbytes`."""

    op: OpId
    nbytes: int
    overwritten: tuple[VersionId, ...] = ()  # versions whose memory it wrote over, uncopied


@dataclass(frozen=True, slots=True)
class Recompute:
    """Backward runs an op again at `step`, which allocates `nbytes`."""

    op: OpId
    nbytes: int
    step: StepId
    overwritten: tuple[VersionId, ...] = ()  # as of Compute


@dataclass(frozen=True, slots=True)
class Backward:
    """Backward does the work of a step; all that the step unpacked is live."""

    step: StepId


@dataclass(frozen=True, slots=True)
class Free:
    """`nbytes` of a value's memory go back to the allocator."""

    version: VersionId
    nbytes: int


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The optimizer updates the parameters; what Python still holds of forward is live."""


Event = Compute | Recompute | Backward | Free | OptimizerStep


def schedule(graph: Graph, save_set: SaveSet) -> Iterator[Event]:
    """Yield the events of one step under `save_set`, in order.

    Ops that must be saved are saved whether or not `save_set` names them.

    Raises:
        UnknownOp: `save_set` names an op that `graph` does not have.
    """
    for op in save_set:
        if not 0 <= op < len(graph.ops):
            raise UnknownOp(op, len(graph.ops))
    return _Replay(graph, with_forced_saves(graph, save_set)).events()


def held_until(graph: Graph, save_set: SaveSet) -> list[int]:
    """Return for each version the first moment at which neither it nor an unsaved one made from it is needed.

    0 for a version that nothing needs. A saved version is held until then (rule a).
    """
    until, dropped = readers_until(graph, save_set), _dropped(graph)
    return [max(pair) for pair in zip(until, dropped, strict=True)]


def _dropped(graph: Graph) -> list[int]:
    """Return for each version the first moment at which autograd holds no saved tensor of it, or 0."""
    return [
        max((graph.saved_tensors[h].dropped for h in value.saved_tensors), default=0)
        for value in graph.versions
    ]


def readers_until(graph: Graph, save_set: SaveSet) -> list[int]:
    """Return for each version the first moment at which no unsaved one made from it is needed, or 0."""
    n = len(graph.ops)
    until, dropped = [0] * len(graph.versions), _dropped(graph)
    in_forward = [min(graph.storages[value.storage].released, n) for value in graph.versions]
    for value in graph.versions:
        if value.previous is not None:
            in_forward[value.previous] = value.op
    op_until = [0] * n  # how long an unsaved op keeps what it reads
    for op in reversed(graph.ops):
        for w in op.writes:
            readers = (reader for reader in graph.versions[w].readers if reader not in save_set)
            until[w] = max((op_until[reader] for reader in readers), default=0)
        op_until[op.id] = max([op.id, *(max(until[w], dropped[w], in_forward[w]) for w in op.writes)])
    return until


@dataclass(frozen=True, slots=True)
class ForwardMemory:
    """The events of the memory that forward allocates, by moment."""

    frees_at: dict[int, list[VersionId]]
    copies_at: dict[int, list[VersionId]]  # versions that are written over while a copy is kept (rule b)
    over_at: dict[int, list[VersionId]]  # versions that are written over, not copied

    @classmethod
    def of(cls, graph: Graph, save_set: SaveSet) -> ForwardMemory:
        """Return the events under a save set."""
        found = cls({}, {}, {})
        until, dropped = readers_until(graph, save_set), _dropped(graph)
        for storage in graph.storages:
            last = storage.versions[-1]
            op = graph.versions[last].op
            packed = (dropped[v] for v in storage.versions if graph.versions[v].op in save_set)
            end = max([storage.released, op + 1, *packed] + ([until[last]] if op in save_set else []))
            if storage.released >= graph.end:
                end = graph.end + 1  # Python holds it during the optimizer's step
            found.frees_at.setdefault(end, []).append(last)
            for v, successor in zip(storage.versions, storage.versions[1:], strict=False):
                written_at = graph.versions[successor].op
                if graph.versions[v].op in save_set and until[v] > written_at:
                    found.copies_at.setdefault(written_at, []).append(v)
                    found.frees_at.setdefault(until[v], []).append(v)
                else:
                    found.over_at.setdefault(written_at, []).append(v)
        return found

    def compute(self, graph: Graph, op: Op) -> Compute:
        """Return the event of `op` in forward."""
        fresh = sum(graph.nbytes(w) for w in op.writes if graph.versions[w].previous is None)
        copies = sum(graph.nbytes(v) for v in self.copies_at.get(op.id, ()))
        return Compute(op.id, fresh + copies, tuple(self.over_at.get(op.id, ())))


def uses_of(graph: Graph, save_set: SaveSet) -> list[int]:
    """Return for each version how often unpacks and recomputed ops will use it."""
    n = len(graph.ops)
    uses = [sum(graph.saved_tensors[h].dropped > n for h in value.saved_tensors) for value in graph.versions]
    for op in reversed(graph.ops):
        if op.id not in save_set and any(uses[w] for w in op.writes):
            for r in op.reads:
                uses[r] += 1
    return uses


def recompute_us(graph: Graph, save_set: SaveSet) -> float:
    """Return the time, in microseconds, of all recomputes of a full backward (rule g)."""
    if all(len(set(handle.unpacked)) < 2 for handle in graph.saved_tensors):
        return sum(
            op.recompute_us
            for op, again in zip(graph.ops, recomputed_by_backward(graph, save_set), strict=True)
            if again
        )
    events = schedule(graph, save_set)
    return sum(graph.ops[event.op].recompute_us for event in events if isinstance(event, Recompute))


class _Replay:
    """State of the replay. Values inside: this module is the only one that sees it."""

    def __init__(self, graph: Graph, save_set: SaveSet) -> None:
        self.graph = graph
        n = len(graph.ops)
        self.saved = [value.op in save_set for value in graph.versions]
        self.cached = [False] * len(graph.versions)
        self.left = uses_of(graph, save_set)  # uses left, of unsaved values
        self.ran = [False] * n
        self.pinned: list[VersionId] = []  # unpacked in this step
        self.passing: list[VersionId] = []  # of these, made in passing
        self.given: set[SavedTensorId] = set()  # unpacked in this step
        self.unpacked: set[SavedTensorId] = set()
        self.forward = ForwardMemory.of(graph, save_set)

    def events(self) -> Iterator[Event]:
        graph, n = self.graph, len(self.graph.ops)
        for op in graph.ops:
            yield from self._frees(op.id)
            yield self.forward.compute(graph, op)
        for step in graph.steps:
            yield from self._frees(n + step.id)
            for h in step.unpacks:
                if h not in self.given:
                    yield from self._unpack(
                        graph.saved_tensors[h].version, step.id, first=h not in self.unpacked
                    )
                self.given.add(h)
            self.unpacked |= self.given
            yield Backward(step.id)
            yield from self._unpin()
            for h in step.drops:
                if not graph.saved_tensors[h].unpacked:
                    yield from self._lose(graph.saved_tensors[h].version)
        yield from self._frees(graph.end)
        yield OptimizerStep()
        yield from self._frees(graph.end + 1)

    def _frees(self, moment: int) -> Iterator[Event]:
        for v in self.forward.frees_at.get(moment, ()):
            yield Free(v, self.graph.nbytes(v))

    def _unpack(self, v: VersionId, step: StepId, *, first: bool) -> Iterator[Event]:
        if self.saved[v]:
            return
        if self.cached[v]:
            self.pinned.append(v)
        else:
            burst = self._burst(v)
            if any(self.ran[op] for op in burst):
                yield from self._run_in_passing(burst, v, step)
                self.passing.append(v)
            else:
                yield from self._run(burst, step)
                self.pinned.append(v)
        self.left[v] -= first

    def _unpin(self) -> Iterator[Event]:
        self.given.clear()
        for v in self.passing:
            yield Free(v, self.graph.nbytes(v))
        self.passing.clear()
        pinned, self.pinned = self.pinned, []
        for v in dict.fromkeys(pinned):
            if not self.left[v] and self.cached[v]:
                yield self._free(v)

    def _free(self, v: VersionId) -> Free:
        self.cached[v] = False
        return Free(v, self.graph.nbytes(v))

    def _burst(self, wanted: VersionId) -> list[OpId]:
        """Return the ops that `wanted` needs, in forward order (rule c)."""
        graph = self.graph
        burst: set[OpId] = set()
        stack = [wanted]
        while stack:
            v = stack.pop()
            op = graph.ops[graph.versions[v].op]
            if not self.saved[v] and not self.cached[v] and op.id not in burst:
                burst.add(op.id)
                stack.extend(op.reads)
        return sorted(burst)

    def _run_in_passing(self, burst: list[OpId], wanted: VersionId, step: StepId) -> Iterator[Event]:
        """Recompute ops whose outputs were freed after their last use (rule g)."""
        graph = self.graph
        made = [w for op in burst for w in graph.ops[op].writes]
        for op in burst:
            yield Recompute(op, sum(graph.nbytes(w) for w in graph.ops[op].writes), step)
        for w in made:
            if w != wanted:
                yield Free(w, graph.nbytes(w))

    def _run(self, burst: list[OpId], step: StepId) -> Iterator[Event]:
        graph = self.graph
        for op_id in burst:
            op = graph.ops[op_id]
            taken = [
                p for w in op.writes if (p := graph.versions[w].previous) is not None and self._may_take(p)
            ]
            nbytes = sum(graph.nbytes(w) for w in op.writes if graph.versions[w].previous not in taken)
            for p in taken:
                self.cached[p] = False
            yield Recompute(op.id, nbytes, step, tuple(taken))
            for w in op.writes:
                self.cached[w] = True
            if not self.ran[op_id]:
                self.ran[op_id] = True
                for r in op.reads:
                    yield from self._use(r)
            for w in op.writes:
                if not self.left[w]:
                    yield self._free(w)

    def _may_take(self, p: VersionId) -> bool:
        """Return True if an in-place op may write into the buffer of version `p` (rule e)."""
        return self.cached[p] and self.left[p] == 1 and not self.graph.versions[p].saved_tensors

    def _use(self, v: VersionId) -> Iterator[Event]:
        if self.saved[v]:
            return
        self.left[v] -= 1
        if not self.left[v] and self.cached[v] and v not in self.pinned:
            yield self._free(v)

    def _lose(self, v: VersionId) -> Iterator[Event]:
        """Drop a use of `v` that will never come (rule f)."""
        stack = [v]
        while stack:
            v = stack.pop()
            if self.saved[v]:
                continue
            yield from self._use(v)
            op = self.graph.ops[self.graph.versions[v].op]
            if not self.ran[op.id] and not any(self.left[w] for w in op.writes):
                self.ran[op.id] = True
                stack.extend(op.reads)
