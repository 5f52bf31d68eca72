"""Keep Python's garbage collector out of the way while a step is recorded.

A record is hundreds of thousands of small objects. Each few thousand of them start the collector, and a full
collection visits everything that a process with torch holds: a third of a profile's time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_frozen = False
"""True while a record has frozen the heap, and for good once the user had: counting visits each object."""


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Have the collector skip the objects that exist already. Cycles that are made inside are collected."""
    global _frozen
    is_first = not _frozen and not gc.get_freeze_count()
    _frozen = True
    if is_first:
        gc.freeze()
    try:
        yield
    finally:
        if is_first:  # a record that began inside may end later
            gc.unfreeze()
            _frozen = False


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch the collector off inside, for code of ours that makes no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
