"""Run a step with moves by hand: a simulator that shares no code with the planner's.

Written from docs/formulation.md (section 10) and docs/memory-model.md alone. What still
refers to a storage of forward is asked at each moment; only backward's cache counts uses.
Use groups, compiled graphs (rule h) and tensors that are unpacked twice (rule g) are not covered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoac.planner.problem.graph import Graph, OpId, SaveSet, Storage, VersionId
from autoac.planner.problem.moves import Link, Move


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold what a step took.

    Attributes:
        copied: by moved version: when its copy out was over, and its copy in.
    """

    peak: int
    end_us: float
    host_bytes: int
    copied: dict[VersionId, tuple[float, float]]


def run(graph: Graph, save_set: SaveSet, moves: Sequence[Move], link: Link) -> Outcome:
    """Return what the step takes that saves `save_set`, moves `moves`, and recomputes the other ops."""
    step = _Step(graph, save_set, moves, link)
    for moment in range(len(graph.ops)):
        step.forward(moment)
    for j in range(len(graph.steps)):
        step.backward(j)
    step.measure(graph.end, graph.closing_bytes)
    nbytes = sum(map(graph.nbytes, step.out))
    return Outcome(step.peak, step.compute, nbytes, {w: (step.out[w], step.into[w]) for w in step.out})


class _Step:
    def __init__(self, graph: Graph, save_set: SaveSet, moves: Sequence[Move], link: Link) -> None:
        self.graph, self.saved, self.link = graph, save_set, link
        self.moves = {move.op: move for move in moves}
        self.peak = 0
        self.compute = self.last_out = self.last_in = 0.0
        self.out: dict[VersionId, float] = {}  # when copies are over
        self.into: dict[VersionId, float] = {}
        self.private: set[VersionId] = set()  # copies of versions that were written over (rule b)
        self.cache: dict[VersionId, int] = {}
        self.has_run: set[OpId] = set()  # and those whose uses were removed (rule f)
        self.uses = self.count_uses()
        self.unpacked: list[VersionId] = []  # in this step

    # What forward and autograd hold

    def reads(self, op: OpId) -> tuple[VersionId, ...]:
        return () if op in self.moves else self.graph.ops[op].reads

    def held_in_forward(self, v: VersionId, moment: int) -> bool:
        """Return True if forward holds `v`, the newest version of its storage."""
        storage = self.graph.storages[self.graph.versions[v].storage]
        i = storage.versions.index(v)
        if i + 1 < len(storage.versions):
            return moment < self.graph.versions[storage.versions[i + 1]].op
        return moment < min(storage.released, len(self.graph.ops))

    def packed(self, v: VersionId, moment: int) -> bool:
        return any(moment < self.graph.saved_tensors[h].dropped for h in self.graph.versions[v].saved_tensors)

    def may_run(self, op: OpId, moment: int) -> bool:
        """Return True if something may still ask for what an unsaved op made."""
        return op not in self.saved and any(
            self.packed(w, moment) or self.held_in_forward(w, moment) or self.will_be_read(w, moment)
            for w in self.graph.ops[op].writes
        )

    def will_be_read(self, v: VersionId, moment: int) -> bool:
        return any(
            self.may_run(reader, moment)
            for reader in self.graph.versions[v].readers
            if v in self.reads(reader)
        )

    def on_device(self, storage: Storage, moment: int) -> bool:
        """Return True if the memory that forward gave a storage is not free."""
        graph = self.graph
        first, last = (graph.versions[storage.versions[i]].op for i in (0, -1))
        if moment < first:
            return False
        move = self.moves.get(last)
        if moment <= last or moment < storage.released or storage.released >= graph.end:
            return True  # what Python holds at the end of backward is there for the optimizer, too
        if move is not None and moment < move.free:
            return True
        held = any(self.packed(v, moment) for v in storage.versions if graph.versions[v].op in self.saved)
        return held or (last in self.saved and self.will_be_read(storage.versions[-1], moment))

    def measure(self, moment: int, extra: int) -> None:
        graph = self.graph
        live = graph.static_bytes + sum(self.cache.values()) + extra
        live += sum(storage.nbytes for storage in graph.storages if self.on_device(storage, moment))
        live += sum(graph.nbytes(v) for v in self.private if self.will_be_read(v, moment))
        self.peak = max(self.peak, live)

    # Forward

    def await_copies_out(self, moment: int) -> None:
        for move in self.moves.values():
            if move.free == moment:
                self.compute = max(self.compute, *(self.out[w] for w in self.graph.ops[move.op].writes))

    def forward(self, moment: int) -> None:
        graph, op = self.graph, self.graph.ops[moment]
        self.await_copies_out(moment)
        for w in op.writes:
            p = graph.versions[w].previous
            if p is not None and graph.versions[p].op in self.saved and self.will_be_read(p, moment):
                self.private.add(p)
        self.measure(moment, op.workspace_bytes + op.extra_bytes)
        self.compute += op.runtime_us
        if op.id in self.moves:
            for w in op.writes:
                begin = max(self.last_out, self.compute)
                self.out[w] = self.last_out = begin + self.link.out_us(graph.nbytes(w))

    # Backward

    def count_uses(self) -> list[int]:
        graph, n = self.graph, len(self.graph.ops)
        uses = [sum(graph.saved_tensors[h].dropped > n for h in v.saved_tensors) for v in graph.versions]
        for op in reversed(graph.ops):
            if op.id not in self.saved and any(uses[w] for w in op.writes):
                for r in self.reads(op.id):
                    uses[r] += 1
        return uses

    def backward(self, j: int) -> None:
        graph, step, moment = self.graph, self.graph.steps[j], len(self.graph.ops) + j
        self.await_copies_out(moment)
        fetched = sorted((op for op, move in self.moves.items() if move.fetch == j), reverse=True)
        for op in fetched:
            self.fetch(op)
            self.measure(moment, step.extra_bytes_while_unpacking)
        for h in step.unpacks:
            self.unpack(graph.saved_tensors[h].version, moment, step.extra_bytes_while_unpacking)
        self.measure(moment, step.extra_bytes_peak)
        self.compute += step.runtime_us
        for v in self.unpacked:
            self.free_without_uses(v)
        self.unpacked.clear()
        for h in step.drops:
            if not graph.saved_tensors[h].unpacked:
                self.remove_use(graph.saved_tensors[h].version)

    def fetch(self, op: OpId) -> None:
        for w in self.graph.ops[op].writes:
            begin = max(self.compute, self.last_in, self.out[w])
            self.into[w] = self.last_in = begin + self.link.in_us(self.graph.nbytes(w))
            self.cache[w] = self.graph.nbytes(w)
        self.has_run.add(op)

    def await_copy_in(self, v: VersionId) -> None:
        self.compute = max(self.compute, self.into.get(v, 0.0))

    def unpack(self, v: VersionId, moment: int, extra: int) -> None:
        if self.graph.versions[v].op in self.saved:
            return
        for op in self.burst(v):
            assert op not in self.has_run
            self.recompute(op, moment, extra)
        self.await_copy_in(v)
        self.unpacked.append(v)
        self.uses[v] -= 1

    def burst(self, v: VersionId) -> list[OpId]:
        found, todo = set(), [v]
        while todo:
            op = self.graph.versions[w := todo.pop()].op
            if op not in self.saved and w not in self.cache:
                found.add(op)
                todo += self.reads(op)
        return sorted(found)

    def recompute(self, op_id: OpId, moment: int, extra: int) -> None:
        graph, op = self.graph, self.graph.ops[op_id]
        for r in op.reads:
            self.await_copy_in(r)
        for w in op.writes:
            p = graph.versions[w].previous
            if p in self.cache and self.uses[p] == 1 and not graph.versions[p].saved_tensors:
                del self.cache[p]  # written in place again (rule e)
            self.cache[w] = graph.nbytes(w)
        self.measure(moment, op.workspace_bytes + extra)
        self.compute += op.recompute_us
        self.has_run.add(op_id)
        for r in op.reads:
            self.uses[r] -= 1
            if r not in self.unpacked:
                self.free_without_uses(r)
        for w in op.writes:
            self.free_without_uses(w)

    def free_without_uses(self, v: VersionId) -> None:
        if not self.uses[v]:
            self.cache.pop(v, None)

    def remove_use(self, v: VersionId) -> None:
        """Remove the use of a saved tensor that autograd dropped without an unpack (rule f)."""
        self.uses[v] -= 1
        self.free_without_uses(v)
        op = self.graph.versions[v].op
        if (
            op not in self.saved
            and op not in self.has_run
            and not any(map(self.uses.__getitem__, self.graph.ops[op].writes))
        ):
            self.has_run.add(op)
            for r in self.reads(op):
                self.remove_use(r)
