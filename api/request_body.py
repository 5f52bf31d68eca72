"""Receive and decode the body of a request, each under a limit: see request_reader.py."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
import zstandard
from fastapi import Request

from autoac.api.errors import BodyTooLarge, BodyTooSlow, Undecodable, UnsupportedBody
from autoac.api.settings import Settings

SMALL = 64 << 10
"""Bytes of a decoded body up to which a child process would take longer to start than to check it."""
MAX_WINDOW = 8 << 20
"""Largest window of a zstd frame, in bytes; RFC 9659 sets it for HTTP."""
MOST_RATIO = 250  # decoded bytes per byte sent; a profile of 50,000 equal ops has 37
ANY_RATIO = 1 << 20  # decoded bytes up to which the ratio is not checked
PIECE = 256  # bytes decoded at a time: at most 64 blocks of 128 KiB, so a bomb is noticed 8 MiB after the cap


@dataclass(frozen=True, slots=True)
class EncodedBody:
    """The body of a request before decompression."""

    coding: str  # "identity" or "zstd"
    content: bytes


async def receive_body(request: Request, settings: Settings) -> EncodedBody:
    """Return the body of a JSON request, as it was sent.

    Args:
        request: a request whose body is not read yet.
        settings: the limits on bytes and time.

    Raises:
        UnsupportedBody: the media type or content coding is another one.
        BodyTooLarge: the body has more bytes.
        BodyTooSlow: the body did not arrive within `body_timeout_s`.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedBody("the Content-Type must be application/json")
    coding = request.headers.get("content-encoding", "").strip().lower() or "identity"
    if coding not in ("identity", "zstd"):
        raise UnsupportedBody("the Content-Encoding must be zstd or identity")
    most = settings.max_sent_bytes
    content = bytearray()
    with anyio.move_on_after(settings.body_timeout_s) as scope:
        async for chunk in request.stream():
            if len(content) + len(chunk) > most:
                raise BodyTooLarge("as sent", most)
            content += chunk
    if scope.cancelled_caught:
        raise BodyTooSlow(f"the body must arrive within {settings.body_timeout_s:g} s")
    return EncodedBody(coding, bytes(content))


def decode_body(body: EncodedBody, most_bytes: int) -> bytes:
    """Return the decoded body. This takes up to a tenth of a second: call it in a thread.

    Raises:
        BodyTooLarge: the body decodes to more than `most_bytes`, or to more than `MOST_RATIO` per byte sent.
        Undecodable: the body does not match its content coding.
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
        raise Undecodable("the body must be exactly one zstd frame, got a part of one, or more")
    return bytes(plain)
