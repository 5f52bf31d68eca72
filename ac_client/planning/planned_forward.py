"""One forward under a policy: the region opened for it, and the cursor that walks with its modules."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Set
from functools import partial

from torch import nn

from ac_client.planning.shape_buckets import Loaded, Quiet
from ac_client.runtime.cursor import Cursor, OffPath
from ac_client.runtime.policy_context import active, save_recompute_policy


class Forward(threading.local):
    """The planned forward that is running; each thread has its own."""

    def __init__(self) -> None:
        self._region: save_recompute_policy | None = None
        self._cursor: Cursor | None = None
        self._loaded: Loaded | None = None
        self._index = 0  # of the forward, among those that wait for one backward
        self._unrecorded = 0  # ops that ran while the mode was off
        self._strict = False
        self._quiet: Quiet = {}  # of the policy that the cursor walks
        self._unseen = 0  # modules that are being called while the mode is off
        self._watched: list[int] = []  # writes before, by module that is being called

    def begin(
        self,
        loaded: Loaded,
        model: nn.Module,
        *,
        waiting: int = 0,
        strict: bool,
        report: Callable[[OffPath], None],
        beside: Set[str],
    ) -> None:
        """Carry `loaded` out from here on; call `report` where the forward of `model` leaves its path.

        So many others are `waiting` for their backward.

        What the modules `beside` run themselves is no part of it.
        """
        self._index = loaded.forward_at(waiting)
        self._loaded, self._unrecorded = loaded, 0
        if not loaded.recomputes:
            return
        route, self._quiet = loaded.ways[self._index]
        self._cursor = Cursor(
            route,
            strict=strict,
            report=report,
            in_forward=partial(_is_called, weakref.ref(model)),
            side_modules=beside,
        )
        self._strict = strict
        self._unseen = 0
        self._watched = []
        region = save_recompute_policy(self._cursor)
        region.__enter__()
        self._region = region

    def end(self, *, whole: bool = False) -> Loaded | None:
        """It is over, or was left open. May be called when none is running. Returns what it ran under.

        Raises:
            LeftThePath: it is over as a `whole`, some ops of its policy did not run, and it is strict.
        """
        region, self._region = self._region, None
        cursor, self._cursor = self._cursor, None
        if region is not None:
            if active.region is not None and active.region.storages.orphans:
                self._quiet.clear()
            region.__exit__(None, None, None)
        loaded, self._loaded = self._loaded, None
        if loaded is not None and self._index < len(loaded.unrecorded):  # else planned again meanwhile
            loaded.unrecorded[self._index] = self._unrecorded
        if whole and cursor is not None:
            cursor.finish()
        return loaded

    def enter(self, path: str) -> None:
        """The module at `path` is called. Stretches that are saved whole run without the mode."""
        if self._loaded is not None and path in self._loaded.skipped:
            self._loaded.met.add(path)
        region = active.region
        if self._cursor is None or region is None:
            return
        if self._cursor.interrupted:
            self.end()
            return
        if self._unseen:
            self._unseen += 1  # inside a module that runs without the mode
            return
        begin = self._cursor.enter(path)
        if begin is not None and not self._strict:
            end = self._quiet.get((path, begin))
            if end is None:
                if self._cursor.saves_all((begin, begin + 1)):
                    region.storages.note_counters()  # for `orphans` to count from the first step on
            elif region.pause():
                self._unseen = 1
                self._unrecorded += end - begin
                self._cursor.jump_to(end)
        self._watched.append(region.storages.writes)

    def leave(self, path: str) -> None:
        """And returns."""
        region = active.region
        if self._cursor is None or region is None:
            return
        if self._unseen:
            self._unseen -= 1
            if self._unseen:
                return
            region.resume()
        called = self._cursor.leave(path)
        writes = self._watched.pop() if self._watched else -1
        if called is not None and writes == region.storages.writes and self._cursor.saves_all(called):
            self._quiet[path, called[0]] = called[1]


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
