"""List the events of one training step under a save set.

NOTE [ Rules of the schedule ]

The runtime and this module follow the same rules. docs/memory-model.md has the terms and an example.

a. *Hold.* A saved version is held from the op that wrote it if autograd packed it or an op of the recompute
   set reads it. Otherwise it is not held for backward. It is held until autograd has dropped its last saved
   tensor, and the last saved tensor of every unsaved version that is computed from it. In forward it is also
   held for as long as forward itself holds such an unsaved version, which may still be packed. If the model
   runs several forwards in the step, this ends with the forward of the version, except in the last forward.
   Autograd holds the storage, including anything that is written to it later.
   Saved or not, forward holds what a backward inside of forward unpacks until that backward needs it no more.
b. *Write over a held version.* An in-place op may write over a saved version that an op of the recompute set
   has read and will read again. A private copy of the old version is made first, and held for that op.
c. *Burst.* An unpack of an unsaved version that is not cached runs the ops that it needs, in forward order.
   A walk along the reads, back to saved or cached versions, finds these ops.
d. *Uses.* An unsaved version has one use for each of its saved tensors and one for each op that will be
   recomputed and reads it. The first unpack of a saved tensor consumes a use, and so does an op that has read
   the version. A version without uses left is freed: after the op that read it last, or at the end of the
   step that unpacked it. An output of a recomputed op that has no uses is freed as soon as the op has run.
e. *In place again.* A recomputed in-place op writes into the memory of the old version if this is the only
   use left of that version and it never had a saved tensor. Otherwise the op writes into a new copy.
f. *Never unpacked.* If a saved tensor is dropped without having been unpacked, its use is removed. If an op
   has not been recomputed, and none of its outputs has a use left, its uses of what it reads are removed too.
g. *Unpacked again.* A later step may unpack a saved tensor again after its version was freed. If the
   burst contains an op that has consumed its uses, it is a temporary recompute: no use is consumed, in-place
   ops write into copies, and everything but the unpacked version is freed at the end of the burst. The
   unpacked version is freed at the end of the step. Backwards that a hook of backward runs do so.
h. *Compiled.* A compiled graph holds a saved version that only its own ops read by uses, as in rule d, and
   not as in rule a: it is freed after the last op of backward that reads it, or at the end of the last step
   that unpacks it. If backward has no use for it, it is freed as soon as forward lets go of it.
i. *Use groups.* An op may be recomputed once for each group of its uses. Each of these runs is an op with
   outputs of its own, and rules c to g apply to it. NOTE [ Use groups ] in problem/use_groups.py says which
   uses are in which group. Forward runs the op once.
j. *Passes.* Uses and cached versions belong to one pass of backward. If a step differentiates a graph several
   times, each pass begins with nothing cached, and with a use for each saved tensor that autograd still
   holds. problem/passes.py makes the runs of each pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoac.planner.errors import UnknownOp
from autoac.planner.problem.graph import (
    Graph,
    Op,
    OpId,
    SavedTensorId,
    SaveSet,
    StepId,
    VersionId,
)
from autoac.planner.problem.save_sets import recomputed_by_backward, with_forced_saves
from autoac.planner.problem.use_groups import joined, later_runs


class Compute(NamedTuple):
    """Forward runs an op that allocates `nbytes`."""

    op: OpId
    nbytes: int
    overwritten: tuple[VersionId, ...] = ()  # versions that the op wrote over without a copy


class Recompute(NamedTuple):
    """Backward recomputes an op at `step`; the op allocates `nbytes`."""

    op: OpId
    nbytes: int
    step: StepId
    overwritten: tuple[VersionId, ...]  # as for Compute
    unpack: SavedTensorId  # whose burst the op is in


class Backward(NamedTuple):
    """Backward does the work of a step, while all versions that the step unpacked are live."""

    step: StepId


class Free(NamedTuple):
    """The allocator gets back `nbytes` of the memory of a version."""

    version: VersionId
    nbytes: int


class OptimizerStep(NamedTuple):
    """The optimizer updates the parameters, while the storages that Python still holds are live."""


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
    save_set = with_forced_saves(graph, save_set)
    return _Replay(joined(graph, save_set), save_set).events()


def held_until(graph: Graph, save_set: SaveSet) -> list[int]:
    """Return for each version the moment until which rule a holds it if it is saved.

    From that moment, autograd holds no saved tensor of the version or of an unsaved version computed from it.
    The moment is 0 for a version that nothing needs.
    """
    return list(map(max, readers_until(graph, save_set), graph.dropped))


def readers_until(graph: Graph, save_set: SaveSet) -> list[int]:
    """Return for each version the moment until which ops that read it may run again; 0 if there are none.

    An unsaved op may run again until autograd has dropped the saved tensors of its outputs, forward holds
    these outputs no more, and no op that reads them may run again.
    """
    until = [0] * len(graph.versions)
    op_until = [0] * len(graph.ops)  # until when an unsaved op needs the versions that it reads
    for op in reversed(graph.ops):
        latest: int = op.id
        for w in op.writes:
            readers = [op_until[reader] for reader in graph.versions[w].readers if reader not in save_set]
            until[w] = max(readers, default=0)
            latest = max(latest, until[w], graph.dropped[w], graph.in_forward_until[w])
        op_until[op.id] = latest
    return until


@dataclass(frozen=True, slots=True)
class ForwardMemory:
    """The events, by moment, of the memory that forward allocates.

    Invariant: a version that is written over is in exactly one of `copies_at` and `over_at`.
    """

    frees_at: dict[int, list[VersionId]]
    copies_at: dict[int, list[VersionId]]  # versions that are copied, then written over (rule b)
    over_at: dict[int, list[VersionId]]  # versions that are written over without a copy

    @classmethod
    def of(
        cls, graph: Graph, save_set: SaveSet, by_uses: Sequence[bool], uses: Sequence[int]
    ) -> ForwardMemory:
        """Return the events of `graph` under `save_set`.

        Args:
            graph: of the step.
            save_set: complete.
            by_uses: as `held_by_uses` returns.
            uses: as `uses_of` returns.
        """
        memory = cls({}, {}, {})
        until, dropped = readers_until(graph, save_set), graph.dropped
        absent = later_runs(graph)
        for storage in graph.storages:
            last = storage.versions[-1]
            op = graph.versions[last].op
            if op in absent:
                continue
            if by_uses[last]:
                if not uses[last]:
                    memory.frees_at.setdefault(max(storage.released, op + 1), []).append(last)
                continue
            packed = (dropped[v] for v in storage.versions if graph.versions[v].op in save_set)
            end = max([storage.released, op + 1, *packed] + ([until[last]] if op in save_set else []))
            if storage.released >= graph.end:
                end = graph.end + 1  # Python holds the storage during the optimizer's step
            memory.frees_at.setdefault(end, []).append(last)
            for v, successor in zip(storage.versions, storage.versions[1:], strict=False):
                written_at = graph.versions[successor].op
                if graph.versions[v].op in save_set and until[v] > written_at:
                    memory.copies_at.setdefault(written_at, []).append(v)
                    memory.frees_at.setdefault(until[v], []).append(v)
                else:
                    memory.over_at.setdefault(written_at, []).append(v)
        return memory

    def compute(self, graph: Graph, op: Op) -> Compute:
        """Return the event for `op` in forward."""
        copies = sum(map(graph.nbytes, self.copies_at.get(op.id, ())))
        return Compute(op.id, graph.fresh_bytes[op.id] + copies, tuple(self.over_at.get(op.id, ())))


def held_by_uses(graph: Graph, save_set: SaveSet) -> list[bool]:
    """Return for each version True if it is saved and rule h says how long it is held."""
    return [
        value.op in save_set
        and graph.ops[value.op].compiled
        and all(graph.ops[reader].compiled for reader in value.readers)
        and graph.storages[value.storage].released <= len(graph.ops)
        and len(graph.storages[value.storage].versions) == 1
        for value in graph.versions
    ]


def uses_of(graph: Graph, save_set: SaveSet) -> list[int]:
    """Return for each version its number of uses by unpacks and recomputed ops (rule d)."""
    uses = list(graph.saved_tensors_in_backward)
    for op in reversed(graph.ops):
        if op.id not in save_set and any(uses[w] for w in op.writes):
            for r in op.reads:
                uses[r] += 1
    return uses


def recompute_us(graph: Graph, save_set: SaveSet) -> float:
    """Return the time, in microseconds, of all recomputes of a full backward, repeats included (rule g)."""
    if all(len(set(saved.unpacked)) < 2 for saved in graph.saved_tensors):
        return sum(
            op.recompute_us
            for op, recomputed in zip(graph.ops, recomputed_by_backward(graph, save_set), strict=True)
            if recomputed
        )
    events = schedule(graph, save_set)
    return sum(graph.ops[event.op].recompute_us for event in events if isinstance(event, Recompute))


class _Replay:
    """The state of one replay of the rules. Only this module uses it; callers see the events."""

    def __init__(self, graph: Graph, save_set: SaveSet) -> None:
        self.graph = graph
        n = len(graph.ops)
        self.by_uses = held_by_uses(graph, save_set)
        self.saved = [value.op in save_set for value in graph.versions]
        self.uses_left = uses_of(graph, save_set)  # kept up to date for unsaved versions, and for rule h
        self.cached = [held and uses > 0 for held, uses in zip(self.by_uses, self.uses_left, strict=True)]
        self.reads_consumed = [False] * n  # True if the uses of the op are consumed or removed
        self.in_use: list[VersionId] = []  # cached versions that this step has unpacked
        self.temporary: list[
            VersionId
        ] = []  # versions that a temporary recompute in this step unpacked (rule g)
        self.unpacked_now: set[SavedTensorId] = set()  # in this step
        self.unpacked_before: set[SavedTensorId] = set()  # in earlier steps
        self.forward = ForwardMemory.of(graph, save_set, self.by_uses, self.uses_left)

    def events(self) -> Iterator[Event]:
        graph, n = self.graph, len(self.graph.ops)
        absent = later_runs(graph)
        for op in graph.ops:
            yield from self._frees(op.id)
            if op.id not in absent:
                yield self.forward.compute(graph, op)
        for step in graph.steps:
            yield from self._frees(n + step.id)
            for h in step.unpacks:
                if h not in self.unpacked_now:
                    yield from self._unpack(h, step.id)
                self.unpacked_now.add(h)
            self.unpacked_before |= self.unpacked_now
            yield Backward(step.id)
            yield from self._end_step()
            for h in step.drops:
                if not graph.saved_tensors[h].unpacked:
                    yield from self._remove_use(graph.saved_tensors[h].version)
        yield from self._frees(graph.end)
        yield OptimizerStep()
        yield from self._frees(graph.end + 1)

    def _frees(self, moment: int) -> Iterator[Event]:
        for v in self.forward.frees_at.get(moment, ()):
            yield Free(v, self.graph.nbytes(v))

    def _unpack(self, h: SavedTensorId, step: StepId) -> Iterator[Event]:
        v = self.graph.saved_tensors[h].version
        if self.saved[v] and not self.by_uses[v]:
            return
        if self.cached[v] or self.by_uses[v]:
            self.in_use.append(v)
        else:
            burst = self._burst(v)
            if any(self.reads_consumed[op] for op in burst):
                yield from self._recompute_temporarily(burst, h, step)
                self.temporary.append(v)
            else:
                yield from self._recompute(burst, h, step)
                self.in_use.append(v)
        self.uses_left[v] -= h not in self.unpacked_before

    def _end_step(self) -> Iterator[Event]:
        self.unpacked_now.clear()
        for v in self.temporary:
            yield Free(v, self.graph.nbytes(v))
        self.temporary.clear()
        in_use, self.in_use = self.in_use, []
        for v in dict.fromkeys(in_use):
            if not self.uses_left[v] and self.cached[v]:
                yield self._free(v)

    def _free(self, v: VersionId) -> Free:
        self.cached[v] = False
        return Free(v, self.graph.nbytes(v))

    def _burst(self, target: VersionId) -> list[OpId]:
        """Return the ops to run for an unpack of `target`, in forward order (rule c)."""
        graph = self.graph
        burst: set[OpId] = set()
        stack = [target]
        while stack:
            v = stack.pop()
            op = graph.versions[v].op
            if not self.saved[v] and not self.cached[v] and op not in burst:
                burst.add(op)
                stack.extend(graph.ops[op].reads)
        return sorted(burst)

    def _recompute_temporarily(self, burst: list[OpId], h: SavedTensorId, step: StepId) -> Iterator[Event]:
        """Recompute the version of `h` without consuming uses, and free everything else (rule g)."""
        graph = self.graph
        outputs = [w for op in burst for w in graph.ops[op].writes]
        for op in burst:
            yield Recompute(op, sum(graph.nbytes(w) for w in graph.ops[op].writes), step, (), h)
        for w in outputs:
            if w != graph.saved_tensors[h].version:
                yield Free(w, graph.nbytes(w))

    def _recompute(self, burst: list[OpId], h: SavedTensorId, step: StepId) -> Iterator[Event]:
        graph = self.graph
        for op_id in burst:
            op = graph.ops[op_id]
            overwritten = [
                p
                for w in op.writes
                if (p := graph.versions[w].previous) is not None and self._may_write_into(p)
            ]
            nbytes = sum(graph.nbytes(w) for w in op.writes if graph.versions[w].previous not in overwritten)
            for p in overwritten:
                self.cached[p] = False
            yield Recompute(op.id, nbytes, step, tuple(overwritten), h)
            for w in op.writes:
                self.cached[w] = True
            if not self.reads_consumed[op_id]:
                self.reads_consumed[op_id] = True
                for r in op.reads:
                    yield from self._consume_use(r)
            for w in op.writes:
                if not self.uses_left[w]:
                    yield self._free(w)

    def _may_write_into(self, p: VersionId) -> bool:
        """Return True if a recomputed in-place op may write into the memory of version `p` (rule e)."""
        return self.cached[p] and self.uses_left[p] == 1 and not self.graph.versions[p].saved_tensors

    def _consume_use(self, v: VersionId) -> Iterator[Event]:
        if self.saved[v] and not self.by_uses[v]:
            return
        self.uses_left[v] -= 1
        if not self.uses_left[v] and self.cached[v] and v not in self.in_use:
            yield self._free(v)

    def _remove_use(self, v: VersionId) -> Iterator[Event]:
        """Remove the use of a saved tensor of `v` that was never unpacked (rule f)."""
        stack = [v]
        while stack:
            v = stack.pop()
            yield from self._consume_use(v)
            if self.saved[v]:
                continue
            op = self.graph.ops[self.graph.versions[v].op]
            if self.reads_consumed[op.id] or any(self.uses_left[w] for w in op.writes):
                continue
            self.reads_consumed[op.id] = True
            stack.extend(op.reads)
