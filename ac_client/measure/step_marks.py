"""One step out of what the allocator reported: where it began, and what ran in which module.

Marks in the record say when a forward of the planned model begins, and when each of its modules does.
"""

from __future__ import annotations

from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner.report.align_measured import MeasuredStep, Ran
from autoac.profiler.torch_facts.module_paths import ROOT
from autoac.profiler.torch_facts.torch_trace import MarkEvent

_FORWARD, _ENTER, _LEAVE = "forward", "enter ", "leave "


class StepMarks:
    """Marks the forwards of a planned model in a timeline that is being recorded."""

    def __init__(self, timeline: AllocatorTimeline) -> None:
        self._timeline = timeline

    def forward(self) -> None:
        """A forward of the model begins."""
        self._timeline.mark(_FORWARD)

    def enter(self, path: str) -> None:
        """So does one of its modules."""
        self._timeline.mark(_ENTER + path)

    def leave(self, path: str) -> None:
        """And ends."""
        self._timeline.mark(_LEAVE + path)


def last_step(timeline: AllocatorTimeline) -> MeasuredStep | None:
    """The last step that was marked in `timeline`, up to the end of the record; None if there is none."""
    if _FORWARD not in timeline.marks:
        return None
    start = timeline.marks[_FORWARD]
    after = [event for event in timeline.events if event.time_ns >= start.time_ns]
    path, ran = [ROOT], []
    last_ns = after[-1].time_ns if after else start.time_ns
    for entry in timeline.ran:
        if entry.time_ns < start.time_ns:
            continue
        if isinstance(entry, MarkEvent):
            if entry.name.startswith(_ENTER):
                path.append(entry.name.removeprefix(_ENTER))
            elif entry.name.startswith(_LEAVE) and len(path) > 1:
                path.pop()
            continue
        last_ns = max(last_ns, entry.ended_ns)
        ran.append(Ran(entry.time_ns / 1e3, entry.ended_ns / 1e3, entry.name, entry.node, path[-1]))
    return MeasuredStep(
        time_us=tuple(change.time_ns / 1e3 for change in (start, *after)),
        live_bytes=tuple(change.live_bytes for change in (start, *after)),
        ran=tuple(ran),
        end_us=last_ns / 1e3,
    )
