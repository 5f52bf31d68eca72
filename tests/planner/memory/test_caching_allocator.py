"""Test the model of CUDA's caching allocator on cases that are seen by eye. Sizes are in MiB."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from autoac.planner.memory.caching_allocator import Allocate, Release, replay

MIB = 1 << 20
KIB = Fraction(1, 1024)


def random_log(rng: random.Random, n: int) -> list[Allocate | Release]:
    """Return a log of `n` events, with sizes of all kinds."""
    log: list[Allocate | Release] = []
    live: list[int] = []
    for name in range(n):
        if live and rng.random() < 0.45:
            log.append(Release(live.pop(rng.randrange(len(live)))))
        else:
            nbytes = rng.choice([700, 40_000, *(mib * MIB for mib in (1, 3, 9, 11, 21, 33))])
            log.append(Allocate(name, nbytes + rng.randrange(9)))
            live.append(name)
    return log


def reserved(*sizes: float | Fraction | str, expandable: bool = False) -> list[float]:
    """Replay a log: a number allocates so many MiB under the next letter, and a letter frees."""
    log: list[Allocate | Release] = []
    letters = iter("ABCDEFGHIJ")
    for size in sizes:
        if isinstance(size, str):
            log.append(Release(ord(size)))
        else:
            log.append(Allocate(ord(next(letters)), int(size * MIB)))
    return [nbytes / MIB for nbytes in replay(log, expandable_segments=expandable)]


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB - 511, 10), (10 * MIB + 1, 12)],
)
def test_size_of_a_request_decides_the_segment(nbytes: int, segment: int) -> None:
    assert replay([Allocate(0, nbytes)]) == [segment * MIB]


def test_small_pool_splits_off_512_bytes() -> None:
    rest = 512 * Fraction(1, MIB)
    assert reserved(1, 1 - rest, rest) == [2, 2, 2]
    assert reserved(1, 1 - rest, rest, rest) == [2, 2, 2, 4]


def test_large_pool_splits_off_more_than_one_mib() -> None:
    assert reserved(9, 9, 2) == [20, 20, 20]
    assert reserved(12, "A", 11, 1 + KIB) == [12, 12, 12, 32]  # 1 MiB remains, which C gets too
    assert reserved(12, "A", 11 - KIB, 1 + KIB) == [12, 12, 12, 12]


def test_smallest_free_block_serves_a_request() -> None:
    assert reserved(30, 12, "A", "B", 12, 30) == [30, 42, 42, 42, 42, 42]


def test_neighbors_merge_and_segments_do_not() -> None:
    assert reserved(6, 6, 6, "A", "C", "B", 18) == [20, 20, 20, 20, 20, 20, 20]
    assert reserved(10, 10, "A", "B", 20) == [10, 20, 20, 20, 40]


def test_expandable_segment_grows_behind_its_last_block() -> None:
    assert reserved(30, "A", 36, expandable=True) == [40, 40, 40]
    assert reserved(30, "A", 50, expandable=True) == [40, 40, 60]
    assert reserved(30, "A", 50) == [30, 30, 80]
    assert reserved(1, 1, 1, expandable=True) == [2, 2, 4]


def test_expandable_segment_fills_a_hole_first() -> None:
    assert reserved(10, 10, 10, 10, "B", 9.5, 10, expandable=True) == [20, 20, 40, 40, 40, 40, 60]


@pytest.mark.parametrize("expandable", [False, True])
def test_reserved_bytes_cover_the_allocated_ones(expandable: bool) -> None:
    for seed in range(50):
        log = random_log(random.Random(seed), 100)
        allocated = [0]
        sizes: dict[int, int] = {}
        for event in log:
            if isinstance(event, Allocate):
                sizes[event.name] = event.nbytes
                allocated.append(allocated[-1] + event.nbytes)
            else:
                allocated.append(allocated[-1] - sizes[event.name])
        reserved = replay(log, expandable_segments=expandable)
        assert all(map(int.__ge__, reserved, allocated[1:])), seed
