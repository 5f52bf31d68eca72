"""Keep Python's garbage collector out of the way while a step is recorded.

A record is hundreds of thousands of small objects. Each few thousand of them start the collector, and a full
collection visits everything that a process with torch holds: a third of a profile's time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Have the collector skip the objects that exist already. Cycles that are made inside are collected."""
    if not gc.isenabled() or gc.get_freeze_count():  # frozen by the user, or by another thread
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch the collector off inside, for code of ours that makes no cycles."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
