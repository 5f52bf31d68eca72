"""What is true of a graph under every save set: the windows outside which a decision plays no part.

Backward is counted here in *states*: state `t` is what is cached after the first `t` unpacks, `t` from 0
to the number of unpacks. All of this is independent of the budget. See docs/formulation.md, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from autoac.planner.problem.graph import Graph, OpId, SaveSet, VersionId
from autoac.planner.problem.save_sets import with_forced_saves

NEVER = 1 << 60
"""In place of a state: there is none."""
END = NEVER - 1
"""The last state, when all unpacks are over."""


class Role(Enum):
    """What the planner may decide about an op."""

    FREE = auto()
    SAVED = auto()  # must be saved
    FOLLOWS = auto()  # not worth saving by itself: runs again exactly when its leader does
    IDLE = auto()  # no save set ever runs it again


@dataclass(frozen=True, slots=True)
class Facts:
    """Windows and roles. Columns by op, by value or by step, as named."""

    graph: Graph
    unpacks: tuple[
        tuple[int, VersionId], ...
    ]  # (step, value) of each unpack, in order; unpack i leads to state i+1
    state_after: tuple[int, ...]  # by step: the state in which it works
    role: tuple[Role, ...]  # by op
    leader: tuple[OpId, ...]  # by op: itself unless it FOLLOWS
    first: tuple[int, ...]  # by op: first state in which its outputs must exist; NEVER if none is unpacked
    earliest: tuple[int, ...]  # by op: first state in which a save set can have run it again
    latest: tuple[int, ...]  # by op: last state in which it can start, if it runs again at all
    cost_us: tuple[float, ...]  # by op: run time of it and its followers
    sources: tuple[tuple[OpId, ...], ...]  # by leader: leaders that it and its followers read, not itself
    readers: tuple[tuple[OpId, ...], ...]  # by op: leaders, other than its own, of the ops that may reread it
    lost: tuple[bool, ...]  # by op: backward may hold back for it and then never run it (rule f)
    last_use: tuple[int, ...]  # by value: last step that needs it because of an unpack; -1: none
    dropped: tuple[int, ...]  # by value: moment at which its own last saved tensor is dropped; 0: none
    sure_until: tuple[int, ...]  # by value: it is held until then at least, if saved and wanted
    until: tuple[int, ...]  # by value: it is held until then at most
    base_release: tuple[
        int, ...
    ]  # by storage: moment at which forward's own allocation goes if nothing is saved
    extra_from: tuple[int, ...]  # by value: moment from which saving it takes bytes that were not held anyway

    @property
    def n_states(self) -> int:
        """How many unpacks there are."""
        return len(self.unpacks)


def facts(graph: Graph, *, merge: bool = True) -> Facts:
    """Work out the windows of `graph`. `merge` switches the merging of followers (section 3) off."""
    n, ops, values = len(graph.ops), graph.ops, graph.versions
    always = with_forced_saves(graph, frozenset())
    unpacks: list[tuple[int, VersionId]] = []
    state_after = []
    for step in graph.steps:
        unpacks += [(step.id, graph.saved_tensors[h].version) for h in step.unpacks]
        state_after.append(len(unpacks))
    first_of_value = [NEVER] * len(values)
    for i, (_, v) in enumerate(unpacks):
        first_of_value[v] = min(first_of_value[v], i + 1)
    first = [min((first_of_value[w] for w in op.writes), default=NEVER) for op in ops]

    # What is saved of an op matters only if autograd packed an output in forward and holds it in backward,
    # or if an op for which that is so reads one.
    runs = [False] * n
    for op in reversed(ops):
        runs[op.id] = op.id not in always and (
            any(graph.saved_tensors[h].dropped > n for w in op.writes for h in values[w].saved_tensors)
            or any(runs[r] for w in op.writes for r in values[w].readers)
        )
    rereaders = [
        tuple(dict.fromkeys(r for w in op.writes for r in values[w].readers if runs[r])) for op in ops
    ]

    base_release = tuple(
        max(storage.released, values[storage.versions[-1]].op + 1) if storage.versions else storage.released
        for storage in graph.storages
    )
    successor = {value.previous: value.op for value in values if value.previous is not None}
    # A version that is written over while autograd holds it is held in its storage, together with newer ones.
    # Which bytes that takes, no single decision says; so here they count for nothing.
    extra_from = tuple(
        base_release[value.storage]
        if value.id not in successor
        else NEVER
        if value.saved_tensors
        else int(successor[value.id])
        for value in values
    )

    leader = list(range(n))
    if merge:
        for op in reversed(ops):
            boss = _leader(graph, op.id, runs, leader, extra_from)
            if boss is not None:
                leader[op.id] = boss
    role = tuple(
        Role.SAVED
        if op.id in always
        else Role.IDLE
        if not runs[op.id]
        else Role.FOLLOWS
        if leader[op.id] != op.id
        else Role.FREE
        for op in ops
    )
    cost = [0.0] * n
    sources: list[dict[OpId, None]] = [{} for _ in range(n)]
    for op in ops:
        if runs[op.id]:
            boss = leader[op.id]
            cost[boss] += op.recompute_us
            for v in op.reads:
                source = leader[values[v].op]
                if source != boss:
                    sources[boss][OpId(source)] = None
    readers = tuple(
        tuple(OpId(b) for b in dict.fromkeys(leader[r] for r in rereaders[op.id]) if b != leader[op.id])
        for op in ops
    )

    earliest, latest = [NEVER] * n, [-1] * n
    for op in reversed(ops):
        if runs[op.id]:
            earliest[op.id] = min([first[op.id], *(earliest[r] for r in rereaders[op.id])])
            latest[op.id] = (
                first[op.id]
                if first[op.id] < NEVER
                else max((latest[r] for r in rereaders[op.id]), default=-1)
            )

    lost = [False] * n
    for op in reversed(ops):
        lost[op.id] = runs[op.id] and (
            any(
                graph.saved_tensors[h].dropped > n and not graph.saved_tensors[h].unpacked
                for w in op.writes
                for h in values[w].saved_tensors
            )
            or any(lost[r] for r in rereaders[op.id])
        )

    dropped = [
        max((graph.saved_tensors[h].dropped for h in value.saved_tensors), default=0) for value in values
    ]
    last_use = [max((_last_use(graph, h) for h in value.saved_tensors), default=-1) for value in values]
    sure, until = [0] * len(values), [0] * len(values)
    for op in reversed(ops):
        for w in op.writes:
            through = [r for r in values[w].readers if runs[r]]
            sures = [max([n, *(sure[x] for x in ops[r].writes)]) for r in through]
            latests = [max([n, *(until[x] for x in ops[r].writes)]) for r in through]
            # A saved op is wanted because autograd packed an output or because some reader runs again.
            alone = not any(values[x].saved_tensors or values[x].readers for x in op.writes if x != w)
            sure[w] = dropped[w] if dropped[w] > n else min(sures, default=0) if alone else 0
            until[w] = max([dropped[w], *latests])
    return Facts(
        graph=graph,
        unpacks=tuple(unpacks),
        state_after=tuple(state_after),
        role=role,
        leader=tuple(OpId(b) for b in leader),
        first=tuple(first),
        earliest=tuple(earliest),
        latest=tuple(latest),
        cost_us=tuple(cost),
        sources=tuple(tuple(row) for row in sources),
        readers=readers,
        lost=tuple(lost),
        last_use=tuple(last_use),
        dropped=tuple(dropped),
        sure_until=tuple(sure),
        until=tuple(until),
        base_release=base_release,
        extra_from=extra_from,
    )


def canonical(f: Facts, save_set: SaveSet) -> SaveSet:
    """The free ops that a program saves in place of `save_set`: no worse, and nothing that is not wanted."""
    graph, n = f.graph, len(f.graph.ops)
    led = with_forced_saves(graph, save_set)
    led |= with_forced_saves(graph, led | {f.leader[op] for op in led if f.role[op] is Role.FOLLOWS})
    again = [False] * n  # wanted and not saved
    kept = set()
    for op in reversed(graph.ops):
        asked = any(
            any(graph.saved_tensors[h].dropped > n for h in graph.versions[w].saved_tensors)
            or any(again[r] for r in graph.versions[w].readers)
            for w in op.writes
        )
        if asked and op.id not in led:
            again[op.id] = True
        elif asked and f.role[op.id] is Role.FREE:
            kept.add(op.id)
    return frozenset(kept)


def starts(f: Facts, save_set: SaveSet) -> list[int]:
    """By op: the state in which `save_set` has it run again first; NEVER if it does not."""
    graph = f.graph
    start = [NEVER] * len(graph.ops)
    save_set = with_forced_saves(graph, save_set)
    for op in reversed(graph.ops):
        if op.id not in save_set:
            start[op.id] = min(
                [f.first[op.id], *(start[r] for w in op.writes for r in graph.versions[w].readers)]
            )
    return start


def _last_use(graph: Graph, h: int) -> int:
    """The last step in which a cached value is needed for saved tensor `h`.

    One that is unpacked several times counts up to its first unpack only: this is what is certain.
    """
    handle = graph.saved_tensors[h]
    if handle.unpacked:
        return handle.unpacked[0]
    return handle.dropped - len(graph.ops) - 1 if handle.dropped > len(graph.ops) else -1


def _leader(
    graph: Graph, op: OpId, runs: list[bool], leader: list[int], extra_from: tuple[int, ...]
) -> int | None:
    """The op that `op` follows: saving that one instead is never worse (docs/formulation.md, section 3)."""
    values = graph.versions
    if not runs[op] or any(values[w].saved_tensors for w in graph.ops[op].writes):
        return None
    if any(_held_anyway(graph, w) for w in graph.ops[op].writes):
        return None
    bosses = {leader[r] for w in graph.ops[op].writes for r in values[w].readers if runs[r]}
    if len(bosses) != 1:
        return None
    boss = bosses.pop()
    if graph.ops[boss].must_recompute:
        return None
    mine = _holdable(graph, op)
    theirs = _holdable(graph, OpId(boss))
    if any(graph.storages[values[w].storage].versions[-1] != w for w in graph.ops[boss].writes):
        return None  # written over: saving it would have the op that does so saved as well
    if sum(graph.nbytes(w) for w in theirs) > sum(graph.nbytes(w) for w in mine):
        return None
    if theirs and mine and max(extra_from[w] for w in mine) > min(extra_from[w] for w in theirs):
        return None
    return boss


def _held_anyway(graph: Graph, v: VersionId) -> bool:
    """Return True if a saved tensor of an older version may hold the memory of `v`: saving it is free."""
    versions = graph.storages[graph.versions[v].storage].versions
    return any(graph.versions[older].saved_tensors for older in versions if older < v)


def _holdable(graph: Graph, op: OpId) -> list[VersionId]:
    """Outputs of `op` that have bytes and that a save set could make the runtime hold."""
    return [
        w
        for w in graph.ops[op].writes
        if graph.nbytes(w) and (graph.versions[w].saved_tensors or graph.versions[w].readers)
    ]
