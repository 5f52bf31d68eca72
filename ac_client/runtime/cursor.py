"""Walks the decisions of a policy along the ops that run, and notices when they are other ops.

No torch: ops and modules are names. NOTE [ Off the path ] (rule 10 of the design): as soon as an op is
not the one that the policy has next, its module is lost: the ops up to the next module boundary are
left to the default. At a boundary the cursor looks up where the policy continues for that module.

That may leave ops out: a layer that was taken out, or is called once more, has no op that tells. So where a
module begins elsewhere than at the next op, the cursor remembers that op, and has left the path if the next
one to run is of that module. It has not if another module is entered first that does have the op: one that is
called from here, but lives elsewhere in the model.

A copy may be left out. A policy serves smaller batches than the one that it was planned for, and `reshape`,
`contiguous` and `matmul` copy nothing where a dimension of size 1 lets them return a view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from autoac.planner.formats.policy import Decision

ROOT = "."
COPY = "aten.clone.default"


@dataclass(frozen=True, slots=True)
class OffPath:
    """The first place at which a step left the policy."""

    expected: str  # key in the policy, or "the end"
    found: str  # module and op that ran

    def __str__(self) -> str:
        return f"expected {self.expected}, found {self.found}"


class LeftThePath(RuntimeError):
    """Strict mode: other ops ran than those of the policy."""

    def __init__(self, off: OffPath) -> None:
        self.off = off
        super().__init__(
            f"the model left its policy: {off}. Plan again for this batch, or pass strict=False to let such "
            "ops be saved"
        )


class Route:
    """The decisions of a policy, laid out for walking. Shared by all cursors of one policy."""

    def __init__(self, decisions: Mapping[str, Decision]) -> None:
        self.keys = list(decisions)
        self.modules = [key.rpartition("/")[0] for key in self.keys]
        self.ops = [key.rpartition("/")[2].rpartition("#")[0] for key in self.keys]
        self.decisions = list(decisions.values())
        self.runs = self._runs()
        # Ops behind it may be those of a loss that the profile was taken with, and no forward runs.
        self.last_in_module = max((i for i, module in enumerate(self.modules) if module != ROOT), default=-1)
        self._unsaved = [0]  # before each position, ops that are recomputed
        for decision in self.decisions:
            self._unsaved.append(self._unsaved[-1] + (decision != "save"))

    def saved_whole(self, stretch: tuple[int, int]) -> bool:
        """Whether every op of `stretch` is saved."""
        begin, end = stretch
        return self._unsaved[begin] == self._unsaved[end]

    def behind_copies(self, position: int) -> int:
        """Return the position of the first op from `position` on that is not a copy."""
        while position < len(self.ops) and self.ops[position] == COPY:
            position += 1
        return position

    def _runs(self) -> dict[str, list[tuple[int, int]]]:
        """For each module, the stretches [begin, end) in which it or a module inside it runs."""
        runs: dict[str, list[tuple[int, int]]] = {}
        open_at: dict[str, int] = {}
        for i, module in enumerate([*self.modules, ROOT]):
            around = set(_prefixes(module)) if i < len(self.modules) else set()
            for path in [path for path in open_at if path not in around]:
                runs.setdefault(path, []).append((open_at.pop(path), i))
            for path in around:
                open_at.setdefault(path, i)
        return runs

    def run_from(self, path: str, position: int) -> tuple[int, int] | None:
        """The first stretch of `path` that ends beyond `position`, or its last one."""
        stretches = self.runs.get(path)
        if not stretches:
            return None
        return next((s for s in stretches if s[1] > position), stretches[-1])


def _prefixes(module: str) -> list[str]:
    if module == ROOT:
        return []
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


class _Call(NamedTuple):
    """A module that is being called."""

    stretch: tuple[int, int] | None  # where the module is in the route; calls in a row are one stretch
    begin: int | None  # where this call began; None if that is not certain
    times_off: int  # how often the path had been left by then


class Cursor:
    """One walk along a route: one forward pass.

    Args:
        route: where it should lead.
        strict: raise where it leads elsewhere.
        report: told of the first place where it does.
        in_forward: return True while the forward that it walks with is running. One that KeyboardInterrupt
            ends says so nowhere: later ops on the thread are none of its own.
        beside: modules that run ops of their own now and then, which no policy has (DistributedDataParallel).
    """

    def __init__(
        self,
        route: Route,
        *,
        strict: bool = False,
        report: Callable[[OffPath], None] | None = None,
        in_forward: Callable[[], bool] = lambda: True,
        beside: Set[str] = frozenset(),
    ) -> None:
        self._in_forward = in_forward
        self.over = False  # the forward was interrupted
        self._times_off = 0
        self._route = route
        self._beside = beside
        self._within = [ROOT]  # the modules that are being called
        self._strict = strict
        self._report = report
        self._position = 0
        self._missed: int | None = None  # where a module was entered that does not go on there
        self._lost = False
        self._stack: list[_Call] = []
        self.off: OffPath | None = None  # the first time that it was lost

    def op(self, name: str) -> Decision | None:
        """The decision for the op that runs now; None if the policy does not have it here.

        Raises:
            LeftThePath: it does not, and the cursor is strict.
        """
        route, i = self._route, self._position
        if self._within[-1] in self._beside and (i >= len(route.ops) or route.modules[i] != self._within[-1]):
            return None
        if not self._lost and i < len(route.ops) and route.ops[i] == name:
            if self._missed is not None:
                self._left(route.keys[i])
            self._position = i + 1
            return route.decisions[i]
        if not self._lost:
            behind = route.behind_copies(i)
            if i < behind < len(route.ops) and route.ops[behind] == name and self._missed is None:
                self._position = behind + 1
                return route.decisions[behind]
            self._lost = True
            self._left(name)
        return None

    def enter(self, path: str) -> int | None:
        """A module's forward begins. Returns where in the route its first op is, if that is certain."""
        self._within.append(path)
        came_to = self._next
        stretch = self._route.run_from(path, came_to)
        if stretch is not None and not stretch[0] <= came_to < stretch[1]:
            behind = self._route.behind_copies(came_to)
            if stretch[0] <= behind < stretch[1]:
                came_to = behind
            else:
                stretch = self._route.run_from(path, self._position)
        begin: int | None = None
        if stretch is not None:
            if self._lost:
                begin = self._position = stretch[0]
                self._missed, self._lost = None, False
            elif stretch[0] <= came_to < stretch[1]:
                begin = self._position = came_to
                self._missed = None
            else:
                self._position, self._missed = stretch[0], came_to
                if self.off is not None:
                    begin = self._position
        self._stack.append(_Call(stretch, begin, self._times_off))
        return begin

    def skip(self, end: int) -> None:
        """The innermost module's ops ran unseen: go on at `end`."""
        self._position, self._missed = end, None

    def leave(self, path: str) -> tuple[int, int] | None:
        """A module's forward is over. Returns the ops of this call in the route, if that is certain."""
        if len(self._within) > 1:
            self._within.pop()
        if not self._stack:
            return None
        call = self._stack.pop()
        if call.stretch is not None and self._lost:
            self._position = call.stretch[1]
            self._lost = False
        if call.begin is None or call.times_off != self._times_off or self._missed is not None:
            return None
        return call.begin, self._position

    def saved_whole(self, stretch: tuple[int, int]) -> bool:
        """Return True if every op of `stretch` is saved."""
        return self._route.saved_whole(stretch)

    def finish(self) -> None:
        """Forward is over.

        Raises:
            LeftThePath: ops are left that it should have run, and the cursor is strict.
        """
        if not self._lost and self._route.behind_copies(self._next) <= self._route.last_in_module:
            self._left("the end of forward")

    @property
    def _next(self) -> int:
        """The op that the policy has next."""
        return self._position if self._missed is None else self._missed

    def _left(self, found: str) -> None:
        route, i = self._route, self._next
        self._missed = None
        self._times_off += 1
        if (self._strict or self.off is None) and not self._in_forward():
            self.over = self._lost = True
            return
        off = OffPath(route.keys[i] if i < len(route.keys) else "the end", found)
        if self._strict:
            raise LeftThePath(off)
        if self.off is None:
            self.off = off
            if self._report is not None:
                self._report(off)
