"""Move the outputs of ops to the host in forward and back in backward, at points of the program.

NOTE [ Moves ]

A move has four points, in the order in which the host issues work, never by a clock:

    leave   after the op has run in forward, its outputs are queued for the copy out
    free    before op `free`, or where that forward of the model ends, compute waits for that copy, and the
            device frees them
    fetch   when backward step `fetch` begins, memory is allocated, and the copy in is queued; of several in
            one step, that of the last op first. Such a step begins with the first unpack of what some op
            made, by which the runtime knows it (`triggers`)
    use     the first unpack or recompute that reads them waits for the copy in

So the bytes live on the device depend on the order of work alone; times change only how long compute waits.
For backward, a moved op is one that is not saved and that reads nothing when it runs again: `with_moves`
says that in a Graph, and schedule.py, simulate.py and the search need no word for it. The step of a fetch
unpacks one more saved tensor; the outputs are then held to the end of the step, which changes nothing: if no
later step uses them, this step unpacks one of their own saved tensors, too.

    chain(4, 4, 4), op 0 moved with free=2, fetch=step 1:   op 0 reads nothing, is held up to op 2, and has
    one more saved tensor, which step 1 unpacks: there it runs again, without cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from autoac.planner.formats.op_key import OpKey
from autoac.planner.formats.profile import DECIDES, OVERWRITTEN, SHAPED_BY_DATA, LinkRates
from autoac.planner.problem.graph import (
    Graph,
    Moment,
    Op,
    OpId,
    SavedTensor,
    SavedTensorId,
    StepId,
    VersionId,
)

MAY_MOVE = {"", DECIDES, OVERWRITTEN, SHAPED_BY_DATA}
"""Reasons for which an op must not run again, but its outputs may move. With any other reason, such as a pin
or a read by another FSDP unit, they stay on the device."""
HANDLING = 0.01  # of the time on the link: what a search charges for a move, so that no move is useless


@dataclass(frozen=True, slots=True)
class Link:
    """The link between the device and the memory of its host, with both directions busy."""

    out_bytes_per_us: float
    in_bytes_per_us: float
    latency_us: float  # of a copy
    host_bytes: int  # that may be used

    @classmethod
    def of(cls, rates: LinkRates, host_bytes: int) -> Self:
        """Return the link with these rates, to `host_bytes` of the host."""
        return cls(rates.out_bytes_per_us, rates.in_bytes_per_us, rates.latency_us, host_bytes)

    def out_us(self, nbytes: int) -> float:
        """Return the microseconds that a copy of `nbytes` to the host takes."""
        return self.latency_us + nbytes / self.out_bytes_per_us

    def in_us(self, nbytes: int) -> float:
        """Return the microseconds that a copy of `nbytes` from the host takes."""
        return self.latency_us + nbytes / self.in_bytes_per_us

    def slower(self, share: float) -> Link:
        """Return the link with `share` of the bandwidth."""
        out, into = share * self.out_bytes_per_us, share * self.in_bytes_per_us
        return replace(self, out_bytes_per_us=out, in_bytes_per_us=into)


@dataclass(frozen=True, slots=True)
class Move:
    """Moves the outputs of `op`: NOTE [ Moves ].

    Invariant: `op < free <= forward_end(op)`, and the first use is in step `fetch` or later. See also
    `code_ends`.
    """

    op: OpId
    free: Moment
    fetch: StepId | None  # None: at the first use

    def is_absent(self, graph: Graph, moment: Moment) -> bool:
        """Return True if the device does not hold the outputs at `moment`."""
        return self.fetch is not None and self.free <= moment <= len(graph.ops) + self.fetch


def movable(graph: Graph, link: Link) -> dict[OpId, int]:
    """Return by op that may be moved the bytes of its outputs.

    Nothing writes over the outputs of such an op. The model's forward saves them and lets go of them, and one
    step unpacks each. Ops whose copy would take more latency than transfer time are left out.
    """
    in_groups = {run for row in graph.runs for run in row}
    found = {}
    for op in graph.ops:
        if op.must_recompute or op.id in in_groups or not op.writes or _is_function(op):
            continue
        if op.must_save not in MAY_MOVE:
            continue
        if not all(_is_simple(graph, w) for w in op.writes):
            continue
        nbytes = sum(map(graph.nbytes, op.writes))
        if nbytes >= link.latency_us * link.out_bytes_per_us and nbytes > 0:
            found[op.id] = nbytes
    return found


def triggers(graph: Graph) -> dict[StepId, OpId]:
    """Return the steps at which a fetch may begin, each with the op by which the runtime knows it.

    The step begins with the first unpack of what that op made in the model's forward.
    """
    in_groups = {run for row in graph.runs for run in row}
    unpacked: set[OpId] = set()
    found = {}
    for step in graph.steps:
        ops = [graph.versions[graph.saved_tensors[h].version].op for h in step.unpacks]
        if ops and ops[0] not in unpacked and ops[0] not in in_groups:
            op, seen = graph.ops[ops[0]], _in_forward(graph, graph.saved_tensors[step.unpacks[0]])
            storages = (graph.storages[graph.versions[w].storage] for w in op.writes)
            if (
                seen
                and op.must_save in MAY_MOVE
                and not _is_function(op)
                and all(len(s.versions) == 1 for s in storages)
            ):
                found[step.id] = op.id
        unpacked.update(ops)
    return found


def code_ends(graph: Graph) -> list[Moment]:
    """Return for each op where the code that runs it ends: its compiled graph, or else the model's forward.

    Free and fetch of a move are in the same code as its op.
    """
    ends, end, inside = list[Moment](), graph.model_end, False
    for op in reversed(graph.ops):
        if op.compiled and not inside:
            end = Moment(op.id + 1)
        ends.append(end if op.compiled else graph.forward_end(op.id))
        inside = op.compiled and not op.begins_graph
    return ends[::-1]


def _is_function(op: Op) -> bool:
    """Return True for a call of an autograd Function, which may save its outputs before it returns them."""
    return "/" in op.name and "." not in OpKey.parse(op.name).op


def handling_us(graph: Graph, moved: Iterable[OpId]) -> float:
    """Return the time that a Graph with moves charges for its moved ops: see HANDLING."""
    return sum(graph.ops[op].recompute_us for op in moved)


def released(graph: Graph, op: OpId) -> list[Moment]:
    """Return for each output of `op` the first moment at which neither Python nor forward holds it."""
    return [graph.storages[graph.versions[w].storage].released for w in graph.ops[op].writes]


def _is_simple(graph: Graph, w: VersionId) -> bool:
    version, end = graph.versions[w], graph.forward_end(graph.versions[w].op)
    tensors = [graph.saved_tensors[h] for h in version.saved_tensors]
    return (
        graph.nbytes(w) > 0
        and len(graph.storages[version.storage].versions) == 1
        and graph.storages[version.storage].released <= end
        and bool(tensors)
        and all(len(set(saved.unpacked)) == 1 and _in_forward(graph, saved) for saved in tensors)
    )


def _in_forward(graph: Graph, saved: SavedTensor) -> bool:
    """Return True if autograd saves the tensor in the forward of the model that makes it.

    A compiled graph saves as it ends.
    """
    op = graph.ops[graph.versions[saved.version].op]
    return saved.packed < graph.forward_end(op.id) + op.compiled


def with_moves(graph: Graph, moves: Sequence[Move], link: Link) -> Graph:
    """Return `graph` with `moves`, which a save set of the result carries out for the ops that it leaves out.

    If the save set saves a moved op, the outputs stay on the device. Ids do not change; saved tensors are
    added at the end.
    """
    ops, versions, storages = list(graph.ops), list(graph.versions), list(graph.storages)
    saved_tensors, steps = list(graph.saved_tensors), list(graph.steps)
    n = len(ops)
    for move in sorted(moves, key=lambda move: move.op):  # a fetch is put before those of earlier ops
        op = ops[move.op]
        for r in op.reads:
            versions[r] = replace(versions[r], readers=tuple(x for x in versions[r].readers if x != op.id))
        nbytes = sum(map(graph.nbytes, op.writes))
        ops[op.id] = replace(
            op,
            reads=(),
            must_save="",
            workspace_bytes=0,  # only forward runs the kernel
            extra_bytes=op.extra_bytes + op.workspace_bytes,
            rerun_us=HANDLING * link.out_us(nbytes),
        )
        for w in op.writes:
            storage = storages[versions[w].storage]
            storages[storage.id] = replace(storage, released=max(storage.released, move.free))
            if move.fetch is None:
                continue
            h, step = SavedTensorId(len(saved_tensors)), steps[move.fetch]
            saved_tensors.append(SavedTensor(h, w, op.id + 1, (step.id,), Moment(n + step.id + 1)))
            versions[w] = replace(versions[w], saved_tensors=(*versions[w].saved_tensors, h))
            steps[step.id] = replace(step, unpacks=(h, *step.unpacks), drops=(*step.drops, h))
    return replace(
        graph,
        ops=tuple(ops),
        versions=tuple(versions),
        storages=tuple(storages),
        saved_tensors=tuple(saved_tensors),
        steps=tuple(steps),
    )
