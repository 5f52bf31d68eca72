"""The bytes of a request's body: received in the event loop, decoded in a thread, each under a cap.

A body waits for its turn as it was sent. So what is decoded at once is at most `max_plain_bytes` for each
of the `reads_at_once` that are checked, however many requests are inside.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio
import zstandard
from fastapi import Request

from autoac.api.errors import BodyTooLarge, BodyTooSlow, Undecodable, UnsupportedBody
from autoac.api.settings import Settings

SMALL = 64 << 10  # bytes of a decoded body that are checked right here: a child would take longer to start
MAX_WINDOW = 8 << 20
"""Most memory that a zstd frame may ask the decoder for; RFC 9659 sets it for HTTP."""
MOST_RATIO = 250  # decoded bytes for each byte sent; a profile of 50,000 equal ops has 37
ANY_RATIO = 1 << 20  # decoded bytes up to which the ratio does not matter
PIECE = 256  # bytes decoded at a time: at most 64 blocks of 128 KiB, so a bomb is noticed 8 MiB after the cap


@dataclass(frozen=True, slots=True)
class EncodedBody:
    """A body as it was sent."""

    coding: str  # "identity" or "zstd"
    content: bytes


async def receive_body(request: Request, settings: Settings, most_bytes: int | None = None) -> EncodedBody:
    """Return the body of a request that says it is JSON.

    Args:
        request: of which nothing was read yet.
        settings: its caps and its time.
        most_bytes: of this body; by default `max_sent_bytes`.

    Raises:
        UnsupportedBody: another media type or content coding.
        BodyTooLarge: more bytes than that.
        BodyTooSlow: it was not there within `body_timeout_s`.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedBody("the Content-Type must be application/json")
    coding = request.headers.get("content-encoding", "").strip().lower() or "identity"
    if coding not in ("identity", "zstd"):
        raise UnsupportedBody("the Content-Encoding must be zstd or identity")
    most = settings.max_sent_bytes if most_bytes is None else most_bytes
    content = bytearray()
    with anyio.move_on_after(settings.body_timeout_s) as scope:
        async for chunk in request.stream():
            if len(content) + len(chunk) > most:
                raise BodyTooLarge("as sent", most)
            content += chunk
    if scope.cancelled_caught:
        raise BodyTooSlow(f"the body was not there after {settings.body_timeout_s:g} s")
    return EncodedBody(coding, bytes(content))


def decode_body(body: EncodedBody, most_bytes: int) -> bytes:
    """Return what a body says. Takes up to a tenth of a second: call it in a thread.

    Raises:
        BodyTooLarge: more than `most_bytes` decoded, or more than `MOST_RATIO` for each byte that was sent.
        Undecodable: it is not what its content coding says.
    """
    most = min(most_bytes, max(ANY_RATIO, MOST_RATIO * len(body.content)))
    if body.coding == "identity":
        if len(body.content) > most:
            raise BodyTooLarge("decoded", most)
        return body.content
    decoder = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj()
    plain = bytearray()
    try:
        for start in range(0, len(body.content), PIECE):
            plain += decoder.decompress(body.content[start : start + PIECE])
            if len(plain) > most:
                raise BodyTooLarge("decoded", most)
    except zstandard.ZstdError:
        raise Undecodable("the body must be one zstd frame with a window of at most 8 MiB") from None
    if not decoder.eof or decoder.unused_data:
        raise Undecodable("the body must be one whole zstd frame, and is cut off or has more after it")
    return bytes(plain)
