"""One forward under a policy: the region opened for it, and the cursor that walks with its modules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Set

from ac_client.buckets import Loaded
from ac_client.cursor import Cursor, OffPath
from ac_client.runtime import active, save_recompute_policy


class Forward(threading.local):
    """The planned forward that is running; each thread has its own."""

    def __init__(self) -> None:
        self._region: save_recompute_policy | None = None
        self._cursor: Cursor | None = None
        self._loaded: Loaded | None = None
        self._unrecorded = 0  # ops that ran while the mode was off
        self._strict = False
        self._quiet: set[tuple[int, int]] = set()  # of the policy that the cursor walks
        self._unseen = 0  # modules that are being called while the mode is off
        self._watched: list[tuple[tuple[int, int] | None, int]] = []  # by module that is being called

    def begin(
        self, loaded: Loaded, *, strict: bool, report: Callable[[OffPath], None], beside: Set[str]
    ) -> None:
        """Carry `loaded` out from here on; `report` is told where the forward leaves its path.

        What the modules `beside` run themselves is no part of it.
        """
        route, self._quiet = loaded.way
        self._cursor = Cursor(route, strict=strict, report=report, beside=beside)
        self._loaded, self._unrecorded = loaded, 0
        self._strict = strict
        self._unseen = 0
        self._watched = []
        region = save_recompute_policy(self._cursor)
        region.__enter__()
        self._region = region

    def end(self, *, whole: bool = False) -> None:
        """It is over, or was left open. May be called when none is running.

        Raises:
            LeftThePath: it is over as a `whole`, some ops of its policy did not run, and it is strict.
        """
        region, self._region = self._region, None
        cursor, self._cursor = self._cursor, None
        if region is not None:
            if active.region is not None and active.region.orphans:
                self._quiet.clear()
            region.__exit__(None, None, None)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.unrecorded = self._unrecorded
        if whole and cursor is not None:
            cursor.finish()

    def enter(self, path: str) -> None:
        """The module at `path` is called. Stretches that are saved whole run without the mode."""
        region = active.region
        if self._cursor is None or region is None:
            return
        if self._unseen:
            self._unseen += 1  # inside a module that runs without the mode
            return
        stretch = self._cursor.enter(path)
        if stretch is not None and not self._strict:
            if stretch not in self._quiet:
                region.before_pause()  # for `orphans` to count from the first step on
            elif region.pause():
                self._unseen = 1
                self._unrecorded += stretch[1] - stretch[0]
        self._watched.append((stretch, region.tracked_writes))

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
            self._cursor.skip()
        stretch, writes = self._watched.pop() if self._watched else (None, 0)
        if stretch is not None and writes == region.tracked_writes:
            self._quiet.add(stretch)
        self._cursor.leave(path)
