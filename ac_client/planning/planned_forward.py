"""One forward under a policy: the region opened for it, and the cursor that walks with its modules."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Set
from functools import partial

from torch import nn

from ac_client.compiled.policy_parts import PolicyParts
from ac_client.planning.loaded_policy import ForwardRoute, PlannedBucket
from ac_client.runtime.cursor import Cursor, OffPath
from ac_client.runtime.policy_context import active, save_recompute_policy
from autoac.profiler.torch_facts.second_stage import set_carrier


class PlannedForward(threading.local):
    """The planned forward that is running; each thread has its own."""

    def __init__(self) -> None:
        self._region: save_recompute_policy | None = None
        self._cursor: Cursor | None = None
        self._bucket: PlannedBucket | None = None
        self._route: ForwardRoute | None = None
        self._unrecorded = 0  # ops that ran while the mode was off
        self._strict = False
        self._unrecorded_depth = 0  # of nested module calls in which the mode is off
        self._writes_before: list[int] = []  # one for each module call that is recorded

    def begin(
        self,
        bucket: PlannedBucket,
        model: nn.Module,
        *,
        waiting: int = 0,
        compiled: bool = False,
        strict: bool,
        report: Callable[[OffPath], None],
        wrappers: Set[str],
    ) -> None:
        """Carry out the policy of `bucket` from here on.

        Args:
            model: whose forward begins.
            waiting: how many earlier forwards wait for their backward.
            compiled: torch.compile runs the whole forward.
            strict: raise if the forward leaves its policy.
            report: called if the forward leaves its policy.
            wrappers: paths of modules whose own ops are in no policy.
        """
        loaded = bucket.loaded
        self._bucket, self._unrecorded = bucket, 0
        if not compiled and not loaded.recomputes:
            return
        route = loaded.forwards[min(waiting, len(loaded.forwards) - 1)]
        if compiled:
            set_carrier(PolicyParts(route.decisions, route.compiled_calls))
            return
        self._route = route
        self._cursor = Cursor(
            self._route.route,
            strict=strict,
            report=report,
            in_forward=partial(_is_called, weakref.ref(model)),
            side_modules=wrappers,
        )
        self._strict = strict
        self._unrecorded_depth = 0
        self._writes_before = []
        region = save_recompute_policy(self._cursor)
        region.__enter__()
        self._region = region

    def end(self, *, whole: bool = False) -> PlannedBucket | None:
        """End the forward, if one is running, and return the bucket it ran under.

        Args:
            whole: the forward has run to its end.

        Raises:
            LeftThePath: `whole`, strict, and some ops of the policy did not run.
        """
        set_carrier(None)
        region, self._region = self._region, None
        cursor, self._cursor = self._cursor, None
        route, self._route = self._route, None
        if region is not None:
            if active.region is not None and active.region.storages.orphans and route is not None:
                route.quiet_calls.clear()
            region.__exit__(None, None, None)
        bucket, self._bucket = self._bucket, None
        if route is not None:
            route.unrecorded = self._unrecorded
        if whole and cursor is not None:
            cursor.finish()
        return bucket

    def enter(self, path: str) -> None:
        """Mark the call of the module at `path`. Calls that are saved whole run without the mode."""
        if self._bucket is not None and path in self._bucket.step.skipped:
            self._bucket.ran_skipped.add(path)
        region = active.region
        if self._cursor is None or self._route is None or region is None:
            return
        if self._cursor.interrupted:
            self.end()
            return
        if self._unrecorded_depth:
            self._unrecorded_depth += 1
            return
        begin = self._cursor.enter(path)
        if begin is not None and not self._strict:
            end = self._route.quiet_calls.get((path, begin))
            if end is None:
                if self._cursor.saves_all((begin, begin + 1)):
                    region.storages.note_counters()  # for `orphans` to count from the first step on
            elif region.pause():
                self._unrecorded_depth = 1
                self._unrecorded += end - begin
                self._cursor.jump_to(end)
        self._writes_before.append(region.storages.writes)

    def leave(self, path: str) -> None:
        """Mark the return of the module at `path`."""
        region = active.region
        if self._cursor is None or self._route is None or region is None:
            return
        if self._unrecorded_depth:
            self._unrecorded_depth -= 1
            if self._unrecorded_depth:
                return
            region.resume()
        called = self._cursor.leave(path)
        writes = self._writes_before.pop() if self._writes_before else -1
        if called is not None and writes == region.storages.writes and self._cursor.saves_all(called):
            self._route.quiet_calls[path, called[0]] = called[1]


def _is_called(model: weakref.ref[nn.Module]) -> bool:
    """Return True if a call of the model is on this thread's stack."""
    called = model()
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is called:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_CALL = nn.Module._call_impl.__code__
