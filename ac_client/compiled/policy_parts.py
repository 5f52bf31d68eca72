"""Carry a policy out in compiled code: choose for each compiled graph of a forward what it saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from ac_client.compiled.moved_tensors import PartMove, insert_moves
from autoac.planner.formats.op_key import OpKey
from autoac.planner.formats.policy import OFFLOAD, SAVE, Decision, MovePoints
from autoac.profiler.compiler.second_stage import BoxedCall, CompiledPart
from autoac.profiler.joint_graph.decided_part import OpName, compile_decided, is_dynamic, ops_of
from autoac.profiler.joint_graph.joint_graph import joined


class PartCall(NamedTuple):
    """A call of a compiled graph in a forward."""

    part: CompiledPart
    outer: str  # the module that called it
    begin: int  # position of its first op in the policy
    end: int
    code: BoxedCall


class PartCalls:
    """The calls of compiled graphs in one forward, as earlier forwards under the same policy made them."""

    def __init__(self, decisions: Mapping[str, Decision], moves: Mapping[str, MovePoints]) -> None:
        self.decisions, self.moves = decisions, moves
        self.calls: list[PartCall] = []

    @cached_property
    def names(self) -> list[OpName]:
        """Return the ops of the policy, in order."""
        return [(key.module, key.op) for key in map(OpKey.parse, self.decisions)]

    def seen_before(self, position: int) -> Counter[OpName]:
        """Return how many ops of each name come before `position`, those of earlier forwards included."""
        earlier: Counter[OpName] = Counter()
        for key in map(OpKey.parse, self.decisions):
            earlier.setdefault((key.module, key.op), key.occurrence or 0)
        return earlier + Counter(self.names[:position])

    def find(self, ops: Sequence[OpName], begin: int) -> int | None:
        """Return the first position from `begin` on at which `ops` follow each other; None if they do not."""
        names, n = self.names, len(ops)
        return next((i for i in range(begin, len(names) - n + 1) if names[i : i + n] == ops), None)


class PolicyParts:
    """Decides, by a policy, what the compiled graphs of one forward save.

    Args:
        known: what earlier forwards under the same policy found; kept up to date.
        module: returns the path of the module that is running.
        ran: called with the positions [begin, end) of the ops of a graph that is about to run.
        left: called with the expected key and the found op if the policy does not have these ops.
    """

    def __init__(
        self,
        known: PartCalls,
        module: Callable[[], str],
        ran: Callable[[int, int], None],
        left: Callable[[str, str], None],
    ) -> None:
        self._known, self._module, self._ran, self._left = known, module, ran, left
        self._n = 0  # calls of compiled graphs so far in this forward

    def callable_of(self, part: CompiledPart) -> BoxedCall:
        """Return the code of `part` for its next call in this forward."""
        n, calls = self._n, self._known.calls
        self._n += 1
        outer = self._module()
        if not (n < len(calls) and calls[n].part is part and calls[n].outer == outer):
            del calls[n:]
            calls.append(self._choose(part, outer, calls[-1].end if calls else 0))
        call = calls[n]
        self._ran(call.begin, call.end)
        return call.code

    def _choose(self, part: CompiledPart, outer: str, after: int) -> PartCall:
        """Find the ops of `part` in the policy, from position `after` on, and compile their decisions."""
        known = self._known
        ops = [(joined(outer, module), op) for module, op in ops_of(part)]
        begin, end = known.find(ops, after), after
        if begin is not None:
            end = begin + len(ops)
        else:
            expected = next(iter(list(known.decisions)[after:]), "the end")
            self._left(expected, f"a compiled graph from {'/'.join(ops[0])} on")
            begin = after
        seen = known.seen_before(begin)
        position: dict[str, int] = {}  # of an op in the graph, by key
        for i, name in enumerate(ops):
            position[str(OpKey(*name, seen[name]))] = i
            seen[name] += 1
        moves = tuple(
            PartMove(i, position.get(points.free, len(ops)), position[points.fetch])
            for key, i in position.items()
            if (points := known.moves.get(key)) is not None and points.fetch in position
        )
        if moves and is_dynamic(part):
            self._left(next(iter(position)), "a compiled graph of dynamic shapes, which moves nothing")
            moves = ()
        saved = tuple(known.decisions.get(key, SAVE) in (SAVE, OFFLOAD) for key in position)
        code = compile_decided(part, saved, moves, insert_moves)
        return PartCall(part, outer, begin, end, code)
