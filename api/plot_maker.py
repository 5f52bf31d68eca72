"""Plot policies that have no stored plot yet, in a child process."""

from __future__ import annotations

from contextlib import suppress

import anyio
from anyio import to_thread
from fastapi import Request

from autoac.api.policy_plot import plot_body
from autoac.api.request_reader import RequestReader, while_connected
from autoac.api.storage.database import AWAY, Database
from autoac.api.storage.plot_cache import read_plot, store_plot
from autoac.api.storage.policy_registry import get_policy, policy_text
from autoac.api.storage.profile_registry import profile_text


class PlotMaker:
    """Make plots on demand and store them. Requests for the same policy share one child process."""

    def __init__(self, database: Database, reader: RequestReader) -> None:
        self._database, self._reader = database, reader
        self._in_progress: dict[str, anyio.Lock] = {}  # by policy

    async def plot(self, request: Request, id: str) -> bytes:
        """Return the plot of a policy, as `policy_plot.draw` makes it.

        Raises:
            NotFound: the policy does not exist, or its profile was deleted.
            Busy: too many bodies are being read. Also raises what `Solver.draw` does.
        """
        with self._reader.reserve_slot(request):
            return await while_connected(request, lambda: self._plot(id))

    async def _plot(self, id: str) -> bytes:
        lock = self._in_progress.setdefault(id, anyio.Lock())
        try:
            async with lock, self._reader.checks:
                found, body = await to_thread.run_sync(self._look, id)
                if found is None:
                    found = await self._reader.solver.draw(body)
                    with suppress(*AWAY):  # the request is answered all the same
                        await to_thread.run_sync(self._store, id, found)
                return found
        finally:
            if not lock.statistics().tasks_waiting:
                self._in_progress.pop(id, None)

    def _look(self, id: str) -> tuple[bytes | None, bytes]:
        """Return (plot, b"") if a plot is stored, else (None, the body from which a child makes it)."""
        with self._database.read() as connection:
            found = read_plot(connection, id)
            if found is not None:
                return found, b""
            digest = get_policy(connection, id).profile_digest
            return None, plot_body(profile_text(connection, digest), policy_text(connection, id))

    def _store(self, id: str, plot: bytes) -> None:
        with self._database.write() as connection:
            store_plot(connection, id, plot, self._reader.settings.keep_drawings_bytes)
