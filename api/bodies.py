"""The bytes of a request's body, decoded, with a cap on both sides of the decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO, cast

import anyio
import zstandard
from fastapi import Request

from autoac.api.errors import BodyTooLarge, BodyTooSlow, Undecodable, UnsupportedBody
from autoac.api.settings import Settings

MAX_WINDOW = 8 << 20
"""Most memory that a zstd frame may ask the decoder for; RFC 9659 sets it for HTTP."""


class _Plain:
    """Collects decoded bytes up to a cap.

    zstandard's `stream_writer` hands over at most 128 KiB at a time, so a bomb is noticed one such piece
    after the cap. Its `decompressobj` would return all that a chunk of input expands to.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.data = bytearray()

    def write(self, piece: bytes | memoryview) -> int:
        if len(self.data) + len(piece) > self.limit:
            raise BodyTooLarge("decoded", self.limit)
        self.data += piece
        return len(piece)


async def read_body(request: Request, settings: Settings) -> bytes:
    """The decoded body of a request that says it is JSON.

    Raises:
        UnsupportedBody: another media type or content coding.
        BodyTooLarge: more than `max_sent_bytes` as sent, or `max_plain_bytes` decoded.
        BodyTooSlow: it was not there within `body_timeout_s`.
        Undecodable: it is not what its content coding says.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedBody("the Content-Type must be application/json")
    plain = _Plain(settings.max_plain_bytes)
    write = _decoder(request.headers.get("content-encoding", "identity").strip().lower(), plain)
    sent = 0
    with anyio.move_on_after(settings.body_timeout_s) as scope:
        async for chunk in request.stream():
            sent += len(chunk)
            if sent > settings.max_sent_bytes:
                raise BodyTooLarge("as sent", settings.max_sent_bytes)
            write(chunk)
    if scope.cancelled_caught:
        raise BodyTooSlow(f"the body was not there after {settings.body_timeout_s:g} s")
    return bytes(plain.data)


def _decoder(coding: str, plain: _Plain) -> Callable[[bytes], object]:
    if coding in ("", "identity"):
        return plain.write
    if coding != "zstd":
        raise UnsupportedBody("the Content-Encoding must be zstd or identity")
    writer = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_writer(cast("IO[bytes]", plain))

    def write(chunk: bytes) -> None:
        try:
            writer.write(chunk)
        except zstandard.ZstdError:
            raise Undecodable("the body is not zstd, or its window is larger than 8 MiB") from None

    return write
