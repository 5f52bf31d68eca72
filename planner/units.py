"""Bytes and microseconds, and how they are written for a person."""

from __future__ import annotations

import math

GIB = 1 << 30
"""`budget_gb` counts these: 1 GB here is 2**30 bytes, as in `nvidia-smi` and torch."""


def bytes_from_gb(gb: float) -> int:
    """Whole bytes in `gb` GiB, rounded down so that a budget is never exceeded by rounding.

    >>> bytes_from_gb(1.5)
    1610612736
    """
    return math.floor(gb * GIB)


def gb_from_bytes(nbytes: int) -> float:
    """`nbytes` in GiB."""
    return nbytes / GIB


def rounded_bytes(nbytes: int, multiple: int) -> int:
    """`nbytes`, up to the next multiple of `multiple`, as an allocator rounds.

    >>> rounded_bytes(513, 512), rounded_bytes(512, 512)
    (1024, 512)
    """
    return -(-nbytes // multiple) * multiple


def format_bytes(nbytes: int) -> str:
    """`nbytes` in the unit that a person would use, three digits.

    >>> format_bytes(3 * GIB // 2), format_bytes(10), format_bytes(2_500_000)
    ('1.50 GiB', '10 B', '2.38 MiB')
    """
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def exact_bytes(nbytes: int) -> str:
    """Return `nbytes` in the unit that a person would use, and exactly: two that differ never look alike.

    >>> exact_bytes(345784), exact_bytes(10)
    ('337.68 KiB (345,784 B)', '10 B')
    """
    text = format_bytes(nbytes)
    return text if text.endswith(" B") else f"{text} ({nbytes:,} B)"


def format_us(us: float) -> str:
    """A duration in the unit that a person would use.

    >>> format_us(3.0), format_us(2500.0), format_us(1.5e6)
    ('3 us', '2.5 ms', '1.50 s')
    """
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    if us >= 1e3:
        return f"{us / 1e3:.1f} ms"
    return f"{us:.0f} us"
