"""Test the model of CUDA's caching allocator on cases that are seen by eye. Sizes are in MiB."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from autoac.planner.memory.caching_allocator import Allocate, Release, Replay, replay

MIB = 1 << 20
KIB = Fraction(1, 1024)


def random_log(rng: random.Random, n: int) -> tuple[list[Allocate | Release], list[int]]:
    """Return a log of `n` events, with sizes of all kinds, and the names that are allocated at its end."""
    log: list[Allocate | Release] = []
    live: list[int] = []
    for name in range(n):
        if live and rng.random() < 0.45:
            log.append(Release(live.pop(rng.randrange(len(live)))))
        else:
            log.append(Allocate(name, rng.choice([700, 40_000, MIB, 3 * MIB, 9 * MIB, 11 * MIB, 33 * MIB])))
            live.append(name)
    return log, live


def run(*sizes: float | Fraction | str, limit: float | None = None, expandable: bool = False) -> Replay:
    """Replay a log: a number allocates so many MiB under the next letter, and a letter frees."""
    log: list[Allocate | Release] = []
    letters = iter("ABCDEFGHIJ")
    for size in sizes:
        if isinstance(size, str):
            log.append(Release(ord(size)))
        else:
            log.append(Allocate(ord(next(letters)), int(size * MIB)))
    return replay(log, limit=None if limit is None else int(limit * MIB), expandable_segments=expandable)


def reserved(
    *sizes: float | Fraction | str, limit: float | None = None, expandable: bool = False
) -> list[float]:
    return [nbytes / MIB for nbytes in run(*sizes, limit=limit, expandable=expandable).reserved]


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB - 511, 10), (10 * MIB + 1, 12)],
)
def test_size_of_a_request_decides_the_segment(nbytes: int, segment: int) -> None:
    assert replay([Allocate(0, nbytes)]).peak == segment * MIB


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


def test_streams_share_no_blocks() -> None:
    log: list[Allocate | Release] = [Allocate(0, 4 * MIB), Release(0), Allocate(1, 4 * MIB, stream=1)]
    assert [nbytes // MIB for nbytes in replay(log).reserved] == [20, 20, 40]


def test_full_device_gets_back_segments_that_are_free_as_a_whole() -> None:
    assert reserved(10, 10, "A", "B", 20, limit=20) == [10, 20, 20, 20, 20]
    assert run(10, 6, "A", 20, limit=30).out_of_memory == 3  # B's segment is in use
    assert run(10, 6, "A", 20, limit=40).out_of_memory is None


def test_expandable_segment_grows_behind_its_last_block() -> None:
    assert reserved(30, "A", 36, expandable=True) == [40, 40, 40]
    assert reserved(30, "A", 50, expandable=True) == [40, 40, 60]
    assert reserved(30, "A", 50) == [30, 30, 80]
    assert reserved(1, 1, 1, expandable=True) == [2, 2, 4]


def test_expandable_segment_fills_a_hole_first() -> None:
    assert reserved(10, 10, 10, 10, "B", 9.5, 10, expandable=True) == [20, 20, 40, 40, 40, 40, 60]


def test_full_device_gets_back_free_pages_of_an_expandable_segment() -> None:
    # Pages of 20: A is in 0 to 50 and B behind it. The two pages that B does not touch go back.
    assert reserved(50, 10, "A", 70, limit=100, expandable=True) == [60, 60, 60, 100]
    assert run(50, 10, "A", 90, limit=100, expandable=True).out_of_memory == 3


@pytest.mark.parametrize("expandable", [False, True])
def test_reserved_bytes_cover_the_allocated_ones_and_all_of_them_can_go_back(expandable: bool) -> None:
    for seed in range(50):
        log, live = random_log(random.Random(seed), 100)
        allocated = [0]
        sizes: dict[int, int] = {}
        for event in log:
            if isinstance(event, Allocate):
                sizes[event.name] = event.nbytes
                allocated.append(allocated[-1] + event.nbytes)
            else:
                allocated.append(allocated[-1] - sizes[event.name])
        log += [Release(name) for name in live]
        done = replay(log, expandable_segments=expandable)
        assert all(map(int.__ge__, done.reserved, allocated[1:])), seed
        last = Allocate(len(log), done.peak // (20 * MIB) * 20 * MIB)  # fits only where nothing else is
        tight = replay([*log, last], limit=done.peak, expandable_segments=expandable)
        assert tight.out_of_memory is None, seed
        assert tight.reserved[-1] == last.nbytes or expandable, seed
