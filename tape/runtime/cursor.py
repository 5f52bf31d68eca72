"""Look up the decision of a policy for each op that runs, and detect when other ops run than expected.

This file knows no torch: ops and modules are names.

NOTE [ Off the path ] (rule 10 of the design)

As soon as an op is not the one that the policy expects next, the cursor is lost: ops get the default decision
up to the next module boundary. There the cursor looks up where the policy continues for that module.

A layer that is skipped or called twice has no op that shows it. So where a module begins elsewhere than at
the expected op, the cursor remembers that op. The forward has left the path if the next op to run belongs
to that module. It has not if a module is entered first that does contain the expected op: such a module is
called from here but belongs to another part of the model.

A layer that is not in the policy, because the profiled forward skipped it (stochastic depth), is decided like
the nearest layer that is: `blocks.7` like `blocks.6`. Its ops have left the path, and so are reported.

A copy may be missing. A policy also serves smaller batches than the one it was planned for, and `reshape`,
`contiguous` and `matmul` copy nothing where a dimension of size 1 lets them return a view.

Equivalent kernels share one key (planner/formats/op_key.py). torch allocates an empty tensor before its own
kernel of batch norm and not before cuDNN's. So an empty tensor may be missing, or there may be one more.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from autoac.planner.formats.op_key import ROOT, OpKey, spans_by_module
from autoac.planner.formats.policy import Decision, MovePoints

COPY = "aten.clone.default"
EMPTY = "aten.empty.memory_format"  # torch's own batch norm allocates one of no bytes; cuDNN's does not
OPTIONAL = {COPY, EMPTY}


class UseGroup:
    """The uses that one run of an op serves: those at position `latest` and before."""

    def __init__(self, latest: float) -> None:
        self.latest = latest


Span = tuple[int, int]
"""Positions [begin, end) in a route."""


class MoveAt(NamedTuple):
    """Where the outputs of an op that moves to the host are freed and fetched, as positions."""

    free: int
    fetch: int | None  # of the op whose outputs backward then first unpacks; None: at the first use


@dataclass(frozen=True, slots=True)
class OffPath:
    """The first op at which a forward left its policy."""

    expected: str  # key in the policy, or "the end"
    found: str  # module and op that ran

    def __str__(self) -> str:
        return f"expected {self.expected}, found {self.found}"


class LeftThePath(RuntimeError):
    """Raised with strict=True if other ops run than those of the policy."""

    def __init__(self, off: OffPath) -> None:
        self.off = off
        super().__init__(
            f"the model left its policy: {off}. Plan again for this batch, or pass strict=False (and leave "
            "save_collectives at True) to let such ops be saved"
        )


class Route:
    """The ops of a policy in the order in which forward runs them, each with its decision.

    A position is an index into this list. All cursors of one policy share the route.
    """

    def __init__(
        self,
        decisions: Mapping[str, Decision],
        use_groups: Mapping[str, Sequence[str]] | None = None,
        moves: Mapping[str, MovePoints] | None = None,
        needed_until: Mapping[str, str] | None = None,
    ) -> None:
        self.keys = list(decisions)
        position = {key: i for i, key in enumerate(self.keys)}
        # By position of an op: its use groups, in the order of backward.
        self.use_groups = {
            position[key]: tuple(UseGroup(position[name]) for name in latest)
            for key, latest in (use_groups or {}).items()
            if key in position and all(name in position for name in latest)
        }
        end = len(self.keys)
        self.moves = {
            position[key]: MoveAt(position.get(points.free, end), position.get(points.fetch))
            for key, points in (moves or {}).items()
            if key in position
        }
        # By position of an op: the op before which forward lets go of its outputs, which a backward inside of
        # forward unpacks.
        self.needed_until = {
            position[key]: position.get(until, end)
            for key, until in (needed_until or {}).items()
            if key in position
        }
        self.triggers = frozenset(move.fetch for move in self.moves.values() if move.fetch is not None)
        self._boundaries = sorted({g.latest for groups in self.use_groups.values() for g in groups[1:]})
        parsed = [OpKey.parse(key) for key in self.keys]
        self.modules = [key.module for key in parsed]
        self.ops = [key.op for key in parsed]
        self.decisions = list(decisions.values())
        self._spans = spans_by_module(self.modules)
        self._siblings: dict[str, str | None] = {}
        # Calls of modules that began on the path, by module and position.
        self.calls: dict[tuple[str, int], _Call] = {}
        # Ops after the last module may be those of the loss that the profile was taken with.
        self.last_in_module = max((i for i, module in enumerate(self.modules) if module != ROOT), default=-1)
        points = self.triggers | {move.free for move in self.moves.values()}
        points |= set(self.needed_until.values())
        self._seen = [0]  # number of ops before each position that the runtime must see
        for i, decision in enumerate(self.decisions):
            self._seen.append(self._seen[-1] + (decision != "save" or i in points))

    def is_quiet(self, span: Span) -> bool:
        """Return True if every op of `span` is saved, nothing moves in it, and no use group ends in it."""
        begin, end = span
        if self._seen[begin] != self._seen[end]:
            return False
        nearest = bisect.bisect_left(self._boundaries, begin - 1)
        return nearest == len(self._boundaries) or self._boundaries[nearest] >= end - 1

    def skip_optional(self, position: int) -> int:
        """Return the position of the first op from `position` on that must run."""
        while position < len(self.ops) and self.ops[position] in OPTIONAL:
            position += 1
        return position

    def span_from(self, path: str, position: int) -> Span | None:
        """Return the span [begin, end) of ops of the module `path`: the first that ends after `position`.

        If all spans of the module end before, return its last span.
        """
        spans = self._spans.get(path)
        if not spans:
            return None
        for span in spans:
            if span[1] > position:
                return span
        return spans[-1]

    def sibling(self, path: str) -> str | None:
        """Return the nearest module of the route whose path differs from `path` in one number, or None.

        Of two that are equally near, it is the one with the lower number. A module of the route has none, nor
        has a module that runs no ops inside a layer of the route.
        """
        if path not in self._siblings:
            self._siblings[path] = None if path in self._spans else self._nearest(path.split("."))
        return self._siblings[path]

    def _nearest(self, parts: list[str]) -> str | None:
        found = []
        for other in self._spans:
            others = other.split(".")
            if len(others) == len(parts):
                differing = [i for i, (a, b) in enumerate(zip(parts, others, strict=True)) if a != b]
                pair = parts[differing[0]], others[differing[0]]
                planned = ".".join(parts[: differing[0] + 1]) in self._spans
                if len(differing) == 1 and all(part.isdecimal() for part in pair) and not planned:
                    number, candidate = map(int, pair)
                    found.append((abs(number - candidate), candidate, other))
        return min(found)[2] if found else None


class _Call(NamedTuple):
    """A call of a module that has not returned."""

    span: Span | None  # of the module in the route; consecutive calls share one span
    begin: int | None  # position at which this call began; None if that is uncertain
    departures: int  # how often the forward had left the path by then


class _Unplanned(NamedTuple):
    """A call of a module that the policy does not have, with the sibling whose decisions it gets."""

    path: str
    sibling: str
    depth: int  # calls around it
    position: int  # where the route continues after it
    lost: bool
    reported: bool = False  # once it runs an op: a module without any leaves no path


class Cursor:
    """Follows one forward pass: knows which op of the policy should run next.

    Args:
        route: the decisions to follow.
        strict: raise where the forward leaves the route.
        report: called with the first op at which it does.
        in_forward: return True while the forward runs. KeyboardInterrupt ends a forward without a hook, and
            later ops on the thread are not part of it.
        side_modules: modules that run ops of their own now and then, which are in no policy
            (DistributedDataParallel).

    Attributes:
        route: the decisions.
        off_path: the first op at which the forward left the route; None if it did not.
        interrupted: True if the forward ended without `finish`.
    """

    def __init__(
        self,
        route: Route,
        *,
        strict: bool = False,
        report: Callable[[OffPath], None] | None = None,
        in_forward: Callable[[], bool] = lambda: True,
        side_modules: Set[str] = frozenset(),
    ) -> None:
        self.off_path: OffPath | None = None
        self.interrupted = False
        self.route = route
        self._strict = strict
        self._report = report
        self._in_forward = in_forward
        self._side_modules = side_modules
        self._modules = [ROOT]  # that are being called
        self._calls: list[_Call] = []
        self._unplanned: _Unplanned | None = None
        self._position = 0
        self._expected: int | None = None  # set where a module was entered elsewhere than at the expected op
        self._lost = False
        self._departures = 0

    def next_decision(self, op: str) -> Decision | None:
        """Return the decision for `op`, which runs now; None if the policy does not expect it here.

        Raises:
            LeftThePath: the policy does not expect `op`, and the cursor is strict.
        """
        route, i = self.route, self._position
        if self._unplanned is not None and not self._unplanned.reported:
            self._unplanned = unplanned = self._unplanned._replace(reported=True)
            self._position = unplanned.position
            self._depart(unplanned.path)
            self._position = i
        if (
            self._side_modules
            and self._modules[-1] in self._side_modules
            and (i > route.last_in_module or route.modules[i] != self._modules[-1])
        ):
            return None
        if not self._lost and i < len(route.ops) and route.ops[i] == op:
            if self._expected is not None:
                self._depart(route.keys[i])
            self._position = i + 1
            return route.decisions[i]
        if not self._lost:
            after = route.skip_optional(i)
            if i < after < len(route.ops) and route.ops[after] == op and self._expected is None:
                self._position = after + 1
                return route.decisions[after]
            if op == EMPTY:
                return None
            self._lost = True
            self._depart(op)
        return None

    def enter(self, path: str) -> int | None:
        """Follow the forward into a module; return the position of its first op if that is certain."""
        self._modules.append(path)
        key = path, self._position
        followed = not self._lost and self._expected is None and self._unplanned is None
        if followed:
            known = self.route.calls.get(key)
            if known is not None and known.departures == self._departures:
                self._calls.append(known)
                return known.begin
        path = self._path_in_route(path)
        expected = self._next
        span = self.route.span_from(path, expected)
        if span is not None and not span[0] <= expected < span[1]:
            after = self.route.skip_optional(expected)
            if span[0] <= after < span[1]:
                expected = after
            else:
                span = self.route.span_from(path, self._position)
        begin: int | None = None
        if span is not None:
            if self._lost:
                begin = self._position = span[0]
                self._expected, self._lost = None, False
            elif span[0] <= expected < span[1]:
                begin = self._position = expected
                self._expected = None
            else:
                self._position, self._expected = span[0], expected
                if self.off_path is not None:
                    begin = self._position
        call = _Call(span, begin, self._departures)
        self._calls.append(call)
        if followed and self._unplanned is None and begin == key[1]:
            self.route.calls[key] = call
        return begin

    def _path_in_route(self, path: str) -> str:
        """Return `path`, or the sibling's path inside a module that is not in the route."""
        if self._unplanned is None:
            sibling = self.route.sibling(path)
            if sibling is None:
                return path
            self._unplanned = _Unplanned(path, sibling, len(self._calls), self._next, self._lost)
            self._lost = True  # so that the sibling is followed from its beginning
        return self._unplanned.sibling + path.removeprefix(self._unplanned.path)

    def jump_to(self, end: int) -> None:
        """Continue at `end`, because the ops before it ran unseen."""
        self._position, self._expected, self._lost = end, None, False

    def leave(self, path: str) -> Span | None:
        """Follow the forward out of a module; return the span of this call if that is certain."""
        if len(self._modules) > 1:
            self._modules.pop()
        if not self._calls:
            return None
        call = self._calls.pop()
        if self._unplanned is not None and len(self._calls) == self._unplanned.depth:
            self._position, self._lost = self._unplanned.position, self._unplanned.lost
            self._expected = self._unplanned = None
            return None
        if call.span is not None and self._lost:
            self._position = call.span[1]
            self._lost = False
        if call.begin is None or call.departures != self._departures or self._expected is not None:
            return None
        return call.begin, self._position

    @property
    def needed_until(self) -> int | None:
        """Return where forward lets go of what the op that started last makes; None: as soon as it likes."""
        return self.route.needed_until.get(self._position - 1)

    @property
    def move(self) -> MoveAt | None:
        """Return how the outputs of the op that started last move; None if they do not."""
        return self.route.moves.get(self._position - 1)

    @property
    def is_trigger(self) -> bool:
        """Return True if backward fetches when it first unpacks an output of the op that started last."""
        return self._position - 1 in self.route.triggers

    @property
    def position(self) -> int:
        """Return the position of the op that started last."""
        return self._position - 1

    @property
    def use_groups(self) -> tuple[UseGroup, ...]:
        """Return the use groups of the op that started last, or ()."""
        return self.route.use_groups.get(self._position - 1, ())

    def finish(self) -> None:
        """End the forward.

        Raises:
            LeftThePath: expected ops did not run, and the cursor is strict.
        """
        if not self._lost and self.route.skip_optional(self._next) <= self.route.last_in_module:
            self._depart("the end of forward")

    @property
    def _next(self) -> int:
        """Return the position of the op that the policy expects next."""
        return self._position if self._expected is None else self._expected

    def _depart(self, found: str) -> None:
        route, i = self.route, self._next
        self._expected = None
        self._departures += 1
        if (self._strict or self.off_path is None) and not self._in_forward():
            self.interrupted = self._lost = True
            return
        off = OffPath(route.keys[i] if i < len(route.keys) else "the end", found)
        if self._strict:
            raise LeftThePath(off)
        if self.off_path is None:
            self.off_path = off
            if self._report is not None:
                self._report(off)
