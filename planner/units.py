"""Convert bytes and microseconds, and format numbers and names for people."""

from __future__ import annotations

import math

GIB = 1 << 30
"""The unit of `budget_gb`, in bytes. As in `nvidia-smi` and torch, 1 GB means 2**30 bytes."""


def bytes_from_gb(gb: float) -> int:
    """Return the whole bytes in `gb` GiB, rounded down so that rounding never raises a budget.

    >>> bytes_from_gb(1.5)
    1610612736
    """
    return math.floor(gb * GIB)


def gb_from_bytes(nbytes: int) -> float:
    """Return `nbytes` in GiB."""
    return nbytes / GIB


def ceil_gb(nbytes: int) -> str:
    """Return `nbytes` in GiB as text, rounded up by at most 0.1 %, so that a budget of that many GiB fits.

    >>> ceil_gb(83_000_000)
    '0.07730'
    """
    digits = max(3, 3 - math.floor(math.log10(gb_from_bytes(max(nbytes, 1)))))
    scale: int = 10**digits
    return f"{-(-nbytes * scale // GIB) / scale:.{digits}f}"


def rounded_bytes(nbytes: int, multiple: int) -> int:
    """Return `nbytes` rounded up to a multiple of `multiple`, as an allocator rounds sizes.

    >>> rounded_bytes(513, 512), rounded_bytes(512, 512)
    (1024, 512)
    """
    return -(-nbytes // multiple) * multiple


def format_bytes(nbytes: int) -> str:
    """Format `nbytes` with a readable unit and two decimals.

    >>> format_bytes(3 * GIB // 2), format_bytes(10), format_bytes(2_500_000)
    ('1.50 GiB', '10 B', '2.38 MiB')
    """
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def exact_bytes(nbytes: int) -> str:
    """Format `nbytes` with a readable unit, followed by the exact number of bytes.

    Different sizes always have different texts.

    >>> exact_bytes(345784), exact_bytes(10)
    ('337.68 KiB (345,784 B)', '10 B')
    """
    text = format_bytes(nbytes)
    return text if text.endswith(" B") else f"{text} ({nbytes:,} B)"


def format_us(us: float) -> str:
    """Format a duration with a readable unit.

    >>> format_us(3.0), format_us(2500.0), format_us(1.5e6)
    ('3 us', '2.5 ms', '1.50 s')
    """
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    if us >= 1e3:
        return f"{us / 1e3:.1f} ms"
    return f"{us:.0f} us"


def printable(text: str) -> str:
    r"""Return `text`, which may have names from a file or the network, as a terminal can show it safely.

    Lines and tabs stay. Other characters that are not printable become escapes.

    >>> printable("Net\x1b[31m")
    'Net\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
