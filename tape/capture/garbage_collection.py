"""Keep Python's garbage collector out of the way while a step is recorded.

A record is hundreds of thousands of small objects. Each few thousand of them start the collector, and a full
collection visits everything that a process with torch holds: a third of a profile's time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_frozen = False  # now by us, or once by the user: counting the frozen objects visits each


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Have the collector skip the objects that exist already. Cycles that are made inside are collected."""
    global _frozen
    frozen, _frozen = _frozen or gc.get_freeze_count() > 0, True
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        _frozen = frozen
        if not frozen:
            gc.unfreeze()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch the collector off inside, for code of ours that makes no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        (gc.enable if enabled else gc.disable)()
