"""Find the window of backward in which each op may run again, and the ops that need no decision of their own.

Everything here holds under every save set and every budget. Symbols and proofs: docs/formulation.md,
sections 1 to 3.

NOTE [ A worked example ]

Four ops in a row. Autograd saves the outputs of a, c and d, and unpacks them in the reverse order:

    op   reads  bytes  us  saved by autograd      moment    0   1   2   3 | 4   5   6
    a    -      4      4   yes                    runs      a   b   c   d | d'  c'  a'     d' unpacks d
    b    a      6      1   no                     state     0   0   0   0 | 1   2   3
    c    b      2      4   yes                    window of a               [-------]
    d    c      3      1   yes                    window of b               [---]
                                                  window of c               [---]
                                                  window of d               [

Backward is counted in *states*: state `t` is what the cache holds after the first `t` unpacks. The first
unpack (state 1) asks for d. If neither d, c nor a is saved, it runs a, b, c and d again; so a may run again
from state 1 on (`earliest`), and it must have by state 3, where its own output is unpacked (`first_needed`).

Nothing unpacks b, and only c reads it: b runs again exactly when c does. To save b instead of c would hold
6 bytes instead of 2 and spare less time, so b *follows* c, which carries the time of both (5 us). Three
decisions are left: save a, save c, save d. arrays.py, program.py and memory_constraints.py continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise

from autoac.planner.problem.graph import Graph, Op, OpId, SavedTensorId, SaveSet, VersionId
from autoac.planner.problem.save_sets import may_be_needed, with_forced_saves
from autoac.planner.problem.use_groups import later_runs

NEVER = 1 << 60
"""In place of a state: none."""
END = NEVER - 1
"""The state after all unpacks."""


class Role(Enum):
    """Says who decides about an op: the program, a rule, or nobody because it never runs again."""

    FREE = auto()  # the planner decides
    SAVED = auto()  # must be saved
    FOLLOWS = auto()  # not worth saving by itself: runs again exactly when its leader does
    UNUSED = auto()  # no save set has it run again


@dataclass(frozen=True, slots=True)
class Windows:
    """When each op may run again, and how long each version may be held.

    Invariant: `earliest[op] <= latest[op] <= first_needed[op]` for every op that may run again.
    """

    graph: Graph
    unpacks: tuple[tuple[int, VersionId], ...]  # (step, version); unpack `i` leads to state `i + 1`
    state_after: tuple[int, ...]  # by step: the state in which it works
    role: tuple[Role, ...]  # by op
    leader: tuple[OpId, ...]  # by op: itself unless it FOLLOWS
    first_needed: tuple[int, ...]  # by op: first state that needs its outputs; NEVER if none is unpacked
    earliest: tuple[int, ...]  # by op: first state in which a save set can have run it again
    latest: tuple[int, ...]  # by op: last state in which it can start, if it runs again at all
    cost_us: tuple[float, ...]  # by op: run time of it and its followers
    sources: tuple[tuple[OpId, ...], ...]  # by leader: other leaders that it and its followers read
    readers: tuple[tuple[OpId, ...], ...]  # by op: other leaders of the ops that may read it again
    may_not_run: tuple[bool, ...]  # by op: backward may hold memory for it and never run it (rule f)
    last_use: tuple[int, ...]  # by version: last step that an unpack needs it in; -1: none
    dropped: tuple[int, ...]  # by version: moment at which its own last saved tensor is dropped; 0: none
    held_at_least: tuple[int, ...]  # by version: moment up to which it is held, if saved and needed
    held_at_most: tuple[int, ...]  # by version: moment from which no save set holds it
    released: tuple[int, ...]  # by storage: moment at which forward's own allocation goes if nothing is saved
    extra_from: tuple[int, ...]  # by version: moment from which saving it takes bytes not held anyway

    @property
    def n_states(self) -> int:
        """Return how many unpacks there are."""
        return len(self.unpacks)


def find_windows(graph: Graph, *, merge_followers: bool = True) -> Windows:
    """Work out the windows of `graph`; without `merge_followers`, no op follows another."""
    n, ops, versions, saved_tensors = len(graph.ops), graph.ops, graph.versions, graph.saved_tensors
    forced = with_forced_saves(graph, frozenset())
    unpacks: list[tuple[int, VersionId]] = []
    state_after = []
    for step in graph.steps:
        unpacks += [(step.id, saved_tensors[h].version) for h in step.unpacks]
        state_after.append(len(unpacks))
    first_of_version = [NEVER] * len(versions)
    for i, (_, v) in reversed(list(enumerate(unpacks))):
        first_of_version[v] = i + 1
    first_needed = [min((first_of_version[w] for w in op.writes), default=NEVER) for op in ops]

    # An op may run again only if backward holds a saved tensor of an output, or an op that may run again
    # reads one.
    may_run = [False] * n
    for op in reversed(ops):
        may_run[op.id] = op.id not in forced and (
            any(graph.dropped[w] > n for w in op.writes)
            or any(may_run[r] for w in op.writes for r in versions[w].readers)
        )
    rereaders = [
        tuple(dict.fromkeys(r for w in op.writes for r in versions[w].readers if may_run[r])) for op in ops
    ]

    absent = later_runs(graph)
    released = tuple(
        max(storage.released, versions[storage.versions[-1]].op + 1)
        if storage.versions and versions[storage.versions[0]].op not in absent
        else storage.released
        for storage in graph.storages
    )
    overwritten_by = {version.previous: version.op for version in versions if version.previous is not None}
    # A version that is written over while autograd holds it is held in its storage, together with newer ones.
    # No single decision says which bytes that takes, so here they count for nothing.
    extra_from = [
        released[version.storage]
        if version.id not in overwritten_by
        else NEVER
        if version.saved_tensors
        else int(overwritten_by[version.id])
        for version in versions
    ]
    dropped = list(graph.dropped)
    held_at_least, held_at_most = _held(graph, may_run, dropped)
    for row in graph.runs:
        for before, run in pairwise(row):
            for v, w in zip(ops[before].writes, ops[run].writes, strict=True):
                extra_from[w] = max(extra_from[v], held_at_most[v])  # until then, `v` is counted
    for row in graph.runs:  # what is saved in forward is held for all runs
        for of_runs in zip(*(graph.ops[run].writes for run in row), strict=True):
            first, alone = of_runs[0], len(graph.ops[row[0]].writes) == 1
            dropped[first] = max(dropped[v] for v in of_runs)
            held_at_most[first] = max(held_at_most[v] for v in of_runs)
            held_at_least[first] = min(held_at_least[v] for v in of_runs) if alone else 0
            if dropped[first] > n:
                held_at_least[first] = max(held_at_least[first], dropped[first])

    leader = _leaders(graph, may_run, rereaders, extra_from) if merge_followers else [op.id for op in ops]
    role = tuple(
        Role.SAVED
        if op.id in forced
        else Role.UNUSED
        if not may_run[op.id]
        else Role.FOLLOWS
        if leader[op.id] != op.id
        else Role.FREE
        for op in ops
    )
    cost = [0.0] * n
    sources: list[dict[OpId, None]] = [{} for _ in ops]
    earliest, latest, may_not_run = [NEVER] * n, [-1] * n, [False] * n
    run_before = _runs_before(graph)
    for op in ops:
        if may_run[op.id]:
            cost[leader[op.id]] += op.recompute_us
            reads = (leader[versions[v].op] for v in op.reads)
            sources[leader[op.id]].update((source, None) for source in reads if source != leader[op.id])
    for op in reversed(ops):
        if may_run[op.id]:
            needed, again = first_needed[op.id], rereaders[op.id]
            earliest[op.id] = min([needed, earliest[op.id], *(earliest[r] for r in again)])
            if op.id in run_before:  # it may be kept from there
                earliest[run_before[op.id]] = earliest[op.id]
            latest[op.id] = needed if needed < NEVER else max((latest[r] for r in again), default=-1)
            packed = [saved_tensors[h] for w in op.writes for h in versions[w].saved_tensors]
            may_not_run[op.id] = any(s.dropped > n and not s.unpacked for s in packed) or any(
                may_not_run[r] for r in again
            )

    return Windows(
        graph=graph,
        unpacks=tuple(unpacks),
        state_after=tuple(state_after),
        role=role,
        leader=tuple(leader),
        first_needed=tuple(first_needed),
        earliest=tuple(earliest),
        latest=tuple(latest),
        cost_us=tuple(cost),
        sources=tuple(tuple(row) for row in sources),
        readers=tuple(
            tuple(dict.fromkeys(leader[r] for r in rereaders[op.id] if leader[r] != leader[op.id]))
            for op in ops
        ),
        may_not_run=tuple(may_not_run),
        last_use=tuple(
            max((_last_use(graph, h) for h in version.saved_tensors), default=-1) for version in versions
        ),
        dropped=tuple(dropped),
        held_at_least=tuple(held_at_least),
        held_at_most=tuple(held_at_most),
        released=released,
        extra_from=tuple(extra_from),
    )


def canonical(windows: Windows, save_set: SaveSet) -> SaveSet:
    """Drop from `save_set` the ops whose outputs nothing needs, and return its free ops.

    Its peak and its recompute time are at most those of `save_set`.
    """
    graph, n = windows.graph, len(windows.graph.ops)
    saved = with_forced_saves(graph, save_set)
    leaders = {windows.leader[op] for op in saved if windows.role[op] is Role.FOLLOWS}
    saved = with_forced_saves(graph, saved | leaders)
    recomputed = [False] * n
    result: set[OpId] = set()
    row_of = {row[-1]: row for row in graph.runs}  # by the last run, the first one in this order
    for op in reversed(graph.ops):
        needed = may_be_needed(graph, op, recomputed)
        if op.id in row_of:
            row = row_of[op.id]
            needed_runs = [may_be_needed(graph, graph.ops[r], recomputed) for r in row]
            used = _used_runs(row, saved, needed_runs)
            result |= {run for run in used if windows.role[run] is Role.FREE}
        if needed and op.id not in saved:
            recomputed[op.id] = True
        elif windows.role[op.id] is Role.FREE and op.id in saved and (needed or reads_overwritten(graph, op)):
            result.add(op.id)
    return frozenset(result)


def reads_overwritten(graph: Graph, op: Op) -> bool:
    """Return True if a later op writes over what `op` reads: if `op` is not saved, a copy is held for it."""
    return any(
        graph.versions[w].previous == v and graph.versions[w].op != op.id
        for v in op.reads
        for w in graph.storages[graph.versions[v].storage].versions
    )


def _used_runs(row: Sequence[OpId], saved: SaveSet, needed: Sequence[bool]) -> set[OpId]:
    """Return the saved runs of `row` whose outputs, or those of a run kept after them, are needed."""
    used: set[OpId] = set()
    later = False
    for run, is_needed in zip(reversed(row), reversed(needed), strict=True):
        later = run in saved and (later or is_needed)
        if later:
            used.add(run)
    return used


def first_runs(windows: Windows, save_set: SaveSet) -> list[int]:
    """Return by op the state in which backward first runs it again under `save_set`; NEVER if it does not."""
    graph = windows.graph
    start = [NEVER] * len(graph.ops)
    save_set = with_forced_saves(graph, save_set)
    run_before = _runs_before(graph)
    passed_on = [NEVER] * len(graph.ops)  # first state in which a kept run needs what the run before makes
    for op in reversed(graph.ops):
        readers = (start[r] for w in op.writes for r in graph.versions[w].readers)
        needed = min([windows.first_needed[op.id], passed_on[op.id], *readers])
        if op.id not in save_set:
            start[op.id] = needed
        elif op.id in run_before:
            passed_on[run_before[op.id]] = needed
    return start


def _runs_before(graph: Graph) -> dict[OpId, OpId]:
    return {run: before for row in graph.runs for before, run in pairwise(row)}


def _last_use(graph: Graph, saved_tensor: SavedTensorId) -> int:
    """Return the last step that is certain to need a cached version for `saved_tensor`.

    If several steps unpack it, only the first of them is certain.
    """
    saved = graph.saved_tensors[saved_tensor]
    if saved.unpacked:
        return saved.unpacked[0]
    return max(saved.dropped - len(graph.ops) - 1, -1)


def _held(graph: Graph, may_run: Sequence[bool], dropped: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return by version `held_at_least` and `held_at_most` of the windows."""
    n, versions, ops = len(graph.ops), graph.versions, graph.ops
    at_least, at_most = [0] * len(versions), [0] * len(versions)
    for op in reversed(ops):
        for w in op.writes:
            again = tuple(r for r in versions[w].readers if may_run[r])
            least = [max([n, *(at_least[x] for x in ops[r].writes)]) for r in again]
            most = [max([n, *(at_most[x] for x in ops[r].writes)]) for r in again]
            # A saved op is needed because autograd packed an output or because some reader runs again, unless
            # it is saved to spare a copy.
            alone = not any(versions[x].saved_tensors or versions[x].readers for x in op.writes if x != w)
            alone = alone and not reads_overwritten(graph, op)
            at_least[w] = dropped[w] if dropped[w] > n else min(least, default=0) if alone else 0
            at_most[w] = max([dropped[w], *most])
    return at_least, at_most


def _leaders(
    graph: Graph, may_run: Sequence[bool], rereaders: Sequence[tuple[OpId, ...]], extra_from: Sequence[int]
) -> list[OpId]:
    """Return by op the op that it follows, or itself. All runs of an op with use groups follow, or none."""
    alone: set[OpId] = set()  # runs that do not follow, since another run of their op does not
    while True:
        leader = [op.id for op in graph.ops]
        for op in reversed(graph.ops):
            if may_run[op.id] and op.id not in alone:
                leader[op.id] = _leader(graph, op.id, rereaders[op.id], leader, extra_from)
        mixed = {
            run for row in graph.runs if any(leader[r] == r for r in row) for run in row if leader[run] != run
        }
        if not mixed:
            return leader
        alone |= mixed


def _leader(
    graph: Graph, op: OpId, rereaders: tuple[OpId, ...], leader: list[OpId], extra_from: Sequence[int]
) -> OpId:
    """Return the op that `op` follows, or `op` itself. To save that op instead of `op` is never worse.

    Source: docs/formulation.md, section 3.
    """
    versions, writes = graph.versions, graph.ops[op].writes
    leaders = {leader[r] for r in rereaders}
    if len(leaders) != 1 or any(versions[w].saved_tensors or _is_held_anyway(graph, w) for w in writes):
        return op
    (other,) = leaders
    if graph.ops[other].must_recompute or reads_overwritten(graph, graph.ops[op]):
        return op
    if any(_last(graph, w) != w or versions[w].carries_older_saved_tensor for w in graph.ops[other].writes):
        return op  # saving the other op would force one more to be saved
    mine, theirs = _holdable(graph, op), _holdable(graph, other)
    # Memory that an op outside of the group writes over later may be held for that op anyway.
    own = [w for w in mine if leader[versions[_last(graph, w)].op] in (op, other)]
    if sum(graph.nbytes(w) for w in theirs) > sum(graph.nbytes(w) for w in own):
        return op
    if theirs and mine and max(extra_from[w] for w in mine) > min(extra_from[w] for w in theirs):
        return op
    return other


def _last(graph: Graph, version: VersionId) -> VersionId:
    """Return the version that is written last to the memory of `version`."""
    return graph.storages[graph.versions[version].storage].versions[-1]


def _is_held_anyway(graph: Graph, version: VersionId) -> bool:
    """Return True if a saved tensor of an older version may hold its memory, so that saving it is free."""
    older = (v for v in graph.storages[graph.versions[version].storage].versions if v < version)
    return any(graph.versions[v].saved_tensors for v in older)


def _holdable(graph: Graph, op: OpId) -> list[VersionId]:
    """Return the outputs of `op` that have bytes and that a save set could make the runtime hold."""
    versions = graph.versions
    return [
        w
        for w in graph.ops[op].writes
        if graph.nbytes(w) and (versions[w].saved_tensors or versions[w].readers)
    ]
