"""Read the events of a job once for all its listeners in this process."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from operator import attrgetter
from typing import Any

from anyio import to_thread
from sqlalchemy import Row

from autoac.api.storage.job_store import JobStore

LOOK_S = 0.25  # between two looks for events


class EventFeed:
    """All events of one job. Listeners call `look` as often as they like, then read `after`."""

    def __init__(self, jobs: JobStore, id: str) -> None:
        self._jobs, self._id = jobs, id
        self._events: list[Row[Any]] = []
        self._looking, self._looked_at = False, -math.inf
        self.ended = False  # no event will follow

    async def look(self) -> None:
        """Read new events, unless another listener is reading or did so in the last `LOOK_S`.

        Raises:
            NotFound: the job does not exist.
            DBAPIError: the database is away.
        """
        if self.ended or self._looking or time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looking = True
        try:
            await to_thread.run_sync(self._read)
        finally:
            self._looking, self._looked_at = False, time.monotonic()

    def after(self, number: int) -> list[Row[Any]]:
        """Return the job's events whose number is greater than `number`, in order."""
        return self._events[bisect_right(self._events, number, key=attrgetter("number")) :]

    def _read(self) -> None:
        # The state first: the second read finds what happens between the two.
        final = self._jobs.get(self._id).final
        while found := self._jobs.events(self._id, self._events[-1].number if self._events else 0):
            self._events += found
        self.ended = final
