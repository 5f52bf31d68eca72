"""Test the allocator's report over a with-block."""

import pytest
import torch

from ac_client.measure.memory_timeline import AllocatorTimeline


def test_every_allocation_and_free_is_counted():
    with AllocatorTimeline() as timeline:
        a = torch.empty(1000)
        b = torch.empty(500)
        del a
        c = torch.empty(100)
        del b, c
    assert [event.live_bytes for event in timeline.events] == [4000, 6000, 2000, 2400, 400, 0]
    assert timeline.peak_bytes == 6000


def test_workspace_of_a_kernel_is_counted():
    a = torch.empty(64, 64)
    with AllocatorTimeline() as timeline:
        (a + 1.0).sum()
    assert timeline.peak_bytes >= 4 * 64 * 64 + 4
    assert timeline.events[-1].live_bytes == 0


def test_peak_since_a_mark_starts_with_the_bytes_live_there():
    with AllocatorTimeline() as timeline:
        a = torch.empty(1000)
        del a
        b = torch.empty(10)
        timeline.mark("late")
        c = torch.empty(1)
        del b, c
    assert timeline.marks["late"].live_bytes == 40
    assert timeline.peak_since("late") == 44
    assert timeline.peak_bytes == 4000


def test_counts_start_at_the_base():
    with AllocatorTimeline(base=7) as timeline:
        pass
    assert (timeline.peak_bytes, timeline.events) == (7, ())
    with AllocatorTimeline(base=100) as timeline:
        torch.empty(10)
    assert timeline.peak_bytes == 140


def test_frees_of_memory_from_an_earlier_block_are_ignored():
    """Ignore a free that torch reports because an earlier profiler saw the allocation."""
    with AllocatorTimeline():
        old = torch.empty(1000)
    with AllocatorTimeline() as timeline:
        new = torch.empty(10)
        del old
        new = torch.empty(20)
        del new
    assert [event.live_bytes for event in timeline.events] == [40, 120, 80, 0]


def test_second_profiler_is_rejected():
    with AllocatorTimeline(), pytest.raises(RuntimeError, match="another torch profiler"):
        AllocatorTimeline().__enter__()


def test_exception_inside_passes_and_ends_the_profiler():
    with pytest.raises(ZeroDivisionError), AllocatorTimeline():
        raise ZeroDivisionError
    with AllocatorTimeline() as timeline:
        torch.empty(1)
    assert timeline.peak_bytes == 4
