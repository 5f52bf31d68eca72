"""Python's garbage collector while a step is recorded.

A record is hundreds of thousands of small objects. Making them sets the collector off again and again, and
each full collection goes through all that a process with torch holds: a third of a profile's time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heap_frozen() -> Iterator[None]:
    """Have the collector leave alone what is there already. Cycles that are made inside are collected."""
    if not gc.isenabled() or gc.get_freeze_count():  # the user's own, or on another thread
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def not_collecting() -> Iterator[None]:
    """Collect nothing inside. For our own code, which makes no cycles."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
