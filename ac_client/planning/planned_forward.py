"""One forward under a policy: the region opened for it, and the cursor that walks with its modules."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Set
from functools import partial

from ac_client.compiled.policy_parts import PolicyParts
from ac_client.planning.batch_shape import ModelCall
from ac_client.planning.loaded_policy import ForwardRoute, PlannedBucket
from ac_client.planning.options import ApplyOptions
from autoac.profiler.compiler.second_stage import set_carrier
from autoac.tape.checkpoints.own_checkpoints import NEEDED, checkpoints_left_alone, plain_checkpoints
from autoac.tape.runtime.cursor import Cursor, LeftThePath, OffPath
from autoac.tape.runtime.policy_context import active, save_recompute_policy
from autoac.tape.runtime.region import Region
from autoac.tape.runtime.replay import RegionGraph
from autoac.tape.runtime.saved_tensor_hooks import RegionHooks
from autoac.tape.runtime.tracked_storages import TrackedStorages
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.module_paths import ROOT, is_called
from autoac.tape.unseen.moving_weights import MOVES

Watched = str | Set[str]
"""Paths of modules, or `EVERY` or `WHOLES`.

Modules without parts inside of others say where a forward has left its policy. To watch them costs more than
all else in a forward that does not.
"""

EVERY, WHOLES = "every module", "modules with parts, and those inside of none"


class PlannedForward:
    """The planned forward that is running on one thread.

    Args:
        options: as passed to `apply`.
        report: called if the forward leaves its policy.
        wrappers: paths of modules whose own ops are in no policy.

    Attributes:
        call: of the model, whose forward runs.
        left: the forward has left its policy.
        ran_skipped: modules that the forward has run, and the profiled one had skipped.
        watched: the modules of whose calls the forward needs to know.
    """

    def __init__(self, options: ApplyOptions, report: Callable[[OffPath], None], wrappers: Set[str]) -> None:
        self._options = options
        self._report_left = report
        self._wrappers = wrappers
        self.left = False
        self.call: ModelCall | None = None
        self._opened: save_recompute_policy | None = None
        self._region: Region | None = None  # that records the forward
        self._cursor: Cursor | None = None
        self._bucket: PlannedBucket | None = None
        self._route: ForwardRoute | None = None
        self.watched: Watched = EVERY
        self._skipped: Set[str] = frozenset()  # modules that the profiled forward did not call
        self.ran_skipped: set[str] = set()
        self._follows = False  # every op is recorded
        self._nodes_before = 0  # that autograd had made
        self._unrecorded = 0  # ops that ran while the mode was off
        # Of modules: the path, and the identity of the exception that was handled as the call began.
        self._calls = [(ROOT, id(sys.exception()))]
        self._unrecorded_depth = 0  # of nested module calls in which the mode is off
        self._writes_before: list[int] = []  # one for each module call that is recorded
        self._quiet: Mapping[tuple[str, int], int] = {}  # calls that are not recorded
        self._closing: list[Callable[[], object]] = []  # to call at the end

    def begin(
        self,
        bucket: PlannedBucket,
        call: ModelCall,
        *,
        waiting: int,
        compiled: bool,
        has_compiled_parts: bool,
        compares: bool,
    ) -> None:
        """Carry out the policy of `bucket` from here on.

        Args:
            call: of the model, whose forward begins.
            waiting: how many earlier forwards wait for their backward.
            compiled: torch.compile runs the whole forward.
            has_compiled_parts: torch.compile runs parts of it.
            compares: backward compares what it recomputes.
        """
        loaded = bucket.loaded
        self._skipped, self.ran_skipped = bucket.step.skipped, set()
        self._bucket, self.call, self._unrecorded, self.left = bucket, call, 0, False
        self._route = route = loaded.route(waiting)
        self._follows = not compiled and bucket.profile is not None and route.follows
        # What autograd saves of weights that come and go is not held: only a region can see to that.
        weights_move = bucket.profile is not None and MOVES in bucket.profile.reasons
        records = self._follows or (not compiled and (loaded.recomputes or weights_move))
        strict = self._options.strict or loaded.communicates
        self.watched = self._skipped
        if records or has_compiled_parts:
            parts = self._follows or has_compiled_parts or self._skipped or compares or strict
            self.watched = EVERY if parts or self._options.verify is not None else WHOLES
        self._nodes_before = private.get_sequence_nr()
        self._calls = [(ROOT, id(sys.exception()))]
        if compiled or has_compiled_parts:
            self._closing.append(partial(set_carrier, None))
            set_carrier(PolicyParts(route.compiled_calls, self._innermost, self._part_ran, self._part_left))
        if self._options.constraints.take_over_checkpoints and not compiled:
            profile = bucket.profile
            needed = profile is not None and NEEDED in profile.notes
            checkpoints = checkpoints_left_alone(needed=True) if needed else plain_checkpoints()
            checkpoints.__enter__()
            self._closing.append(checkpoints.__exit__)
            if compares and not needed and not records and not has_compiled_parts:
                self._compare_checkpoints()
        if compiled:
            route.unrecorded = len(route.decisions)
        if not records:
            return
        self._cursor = Cursor(
            route.route,
            strict=strict,
            report=self._report,
            in_forward=partial(is_called, weakref.ref(call.model)),
            side_modules=self._wrappers,
        )
        self._unrecorded_depth, self._writes_before = 0, []
        self._quiet = {} if self._options.strict or self._follows else route.quiet_calls
        self._opened = save_recompute_policy(self._cursor)
        self._opened.__enter__()
        self._region = active.region
        if self._region is not None:
            self._region.module = self._innermost
            if compares:
                self._region.graph.compare()

    def begin_observed(self) -> None:
        """Follow the calls of a forward that runs under no policy."""
        self._calls = [(ROOT, id(sys.exception()))]

    def _compare_checkpoints(self) -> None:
        """Have backward compare what plain calls save, without a region: NOTE [ Needed checkpoints ]."""
        graph = RegionGraph(None)
        graph.compare()
        hooks = RegionHooks(TrackedStorages(graph), graph)
        hooks.enter()
        self._closing.append(hooks.exit)

    def _report(self, off: OffPath) -> None:
        self.left = True
        self._report_left(off)

    @property
    def raises(self) -> bool:
        """Return True while an exception leaves the innermost call.

        An exception that was already being handled as the call began does not count.
        """
        return self._calls[-1][1] != id(sys.exception())

    def end(self, *, whole: bool = False) -> PlannedBucket | None:
        """End the forward, if one is running, and return the bucket it ran under.

        Args:
            whole: the forward has run to its end.

        Raises:
            LeftThePath: `whole`, strict, and some ops of the policy did not run.
        """
        while self._closing:
            self._closing.pop()()
        opened, self._opened, self._region = self._opened, None, None
        cursor, self._cursor = self._cursor, None
        route, self._route = self._route, None
        if opened is not None:
            opened.__exit__(None, None, None)
        bucket, self._bucket, self.call, self._skipped = self._bucket, None, None, frozenset()
        if whole and route is not None:
            if cursor is not None:
                route.unrecorded = self._unrecorded
            nodes = private.get_sequence_nr() - self._nodes_before
            if nodes > route.nodes:  # it made more than any forward of which all was recorded: the next is
                route.follows = not self._follows
            if self._follows:
                route.nodes = max(route.nodes, nodes)
        if whole and cursor is not None:
            cursor.finish()
        return bucket

    def enter(self, path: str) -> None:
        """Note a call of the module at `path`. If every op of the call is saved, turn recording off."""
        self._calls.append((path, id(sys.exception())))
        if path in self._skipped:
            self.ran_skipped.add(path)
        region, cursor = self._region, self._cursor
        if region is None or cursor is None:
            return
        if cursor.interrupted:
            self.end()
            return
        if self._unrecorded_depth:
            self._unrecorded_depth += 1
            return
        begin = cursor.enter(path)
        if begin is not None and (end := self._quiet.get((path, begin))) is not None and region.pause():
            self._unrecorded_depth = 1
            self._unrecorded += end - begin
            cursor.jump_to(end)
        self._writes_before.append(region.storages.writes)

    def leave(self, path: str) -> None:
        """Mark the end of the call of the module at `path`. A route learns from calls that return."""
        called, handled = self._calls[-1]
        if called != path:
            return  # a hook of the user's raised before `enter`
        if len(self._calls) > 1:
            self._calls.pop()
        region, cursor, route = self._region, self._cursor, self._route
        if region is None or cursor is None or route is None:
            return
        if self._unrecorded_depth:
            self._unrecorded_depth -= 1
            if self._unrecorded_depth:
                return
            region.resume()
        span = cursor.leave(path)
        writes = self._writes_before.pop() if self._writes_before else -1
        if handled != id(sys.exception()):  # raised: calls around this one did not run all their ops either
            self._writes_before = [-1] * len(self._writes_before)
        elif (
            span is not None
            and writes == region.storages.writes
            and route.quiet_calls.get((path, span[0])) != span[1]
            and route.route.is_quiet(span)
        ):
            route.quiet_calls[path, span[0]] = span[1]

    def _innermost(self) -> str:
        return self._calls[-1][0]

    def _part_ran(self, begin: int, end: int) -> None:
        """Continue after a compiled graph, whose ops the cursor does not see."""
        self._unrecorded += end - begin
        if self._cursor is not None and not self._unrecorded_depth:
            self._cursor.jump_to(end)

    def _part_left(self, expected: str, found: str) -> None:
        """Report a compiled graph that is not in the policy.

        Raises:
            LeftThePath: strict.
        """
        off = OffPath(expected, found)
        if self._options.strict:
            raise LeftThePath(off)
        self._report(off)


class ForwardOfThread(threading.local):
    """Hold a `PlannedForward` for each thread that asks for one.

    Attributes of a `threading.local` are slow, so there is only this one.
    """

    def __init__(self, options: ApplyOptions, report: Callable[[OffPath], None], wrappers: Set[str]) -> None:
        self.forward = PlannedForward(options, report, wrappers)
