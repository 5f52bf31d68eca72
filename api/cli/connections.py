"""Close connections whose request head does not end: uvicorn has no limit for them."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LAST_LOOK_S = 0.05  # for bytes that came in time: after a stall, timers fire before sockets are read
MOST_HEAD = 64 << 10  # bytes of a head; uvicorn's other parser has the same cap


class HeadLimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with a limit on the seconds and the bytes of a request's head.

    A head begins with the connection or with the first byte after a request, and ends with its empty line.
    Between two requests uvicorn's keep-alive timeout applies; after the head, the limits of request_body.py.
    """

    def __init__(self, *arguments: Any, head_timeout_s: float, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._begin_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._end_head()
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MOST_HEAD:
            raise ValueError(f"a head must have at most {MOST_HEAD} bytes")  # httptools makes it a 400
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is not None:  # the head goes on
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD:
                self.transport.close()

    def _begin_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self._close_after_a_last_look)
            self._head_bytes = 0

    def _close_after_a_last_look(self) -> None:
        self._head_timer = self.loop.call_later(LAST_LOOK_S, self.transport.close)

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(LAST_LOOK_S, super().timeout_keep_alive_handler)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
