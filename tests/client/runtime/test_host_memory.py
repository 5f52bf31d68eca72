"""Chunks of the host's memory never overlap, also if a garbage collection ends some at any moment."""

from __future__ import annotations

import gc
import itertools
import random
from typing import Any

import pytest
import torch

from autoac.tape.runtime.moves import host_memory
from autoac.tape.runtime.moves.host_memory import HostChunk, HostMemory


class Cycle:
    """Keeps a chunk until the next garbage collection."""

    def __init__(self, chunk: HostChunk) -> None:
        self.chunk, self.me = chunk, self


@pytest.mark.parametrize("seed", range(4))
def test_chunks_that_die_in_a_collection_leave_no_overlap(seed: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(host_memory, "ARENA_NBYTES", 1 << 16)
    chance, memory, live = random.Random(seed), HostMemory(), list[HostChunk]()
    before = gc.get_threshold()
    gc.set_threshold(chance.choice((3, 7, 20)))
    try:
        for _ in range(800):
            chunk = memory.allocate(chance.randint(1, 2000), torch.device("cpu"))
            if chance.random() < 0.5:
                Cycle(chunk)
            else:
                live.append(chunk)
            del chunk
            if len(live) > 20:
                del live[chance.randrange(len(live))]
            spans = sorted((c.data.data_ptr(), c.data.data_ptr() + c.data.numel()) for c in live)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    finally:
        gc.set_threshold(*before)
    live.clear()
    gc.collect()
    assert memory.used == 0
    assert sum(free.end - free.begin for arena in memory._arenas for free in arena.free) == memory.reserved
