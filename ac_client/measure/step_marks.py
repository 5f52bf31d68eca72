"""Name the marks of forwards and module calls in a recorded timeline, and cut the last step out of it."""

from __future__ import annotations

from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner.report.align_measured import MeasuredStep, ProfiledCall
from autoac.tape.torch_facts.module_paths import ROOT
from autoac.tape.torch_facts.torch_trace import MarkEvent

FORWARD = "forward"  # a forward of the model begins
ENTER, LEAVE = "enter ", "leave "  # a submodule's forward begins or ends; followed by its path


def last_step(timeline: AllocatorTimeline) -> MeasuredStep | None:
    """Return the last marked step, from its forward to the end of `timeline`; None if none is marked."""
    if FORWARD not in timeline.marks:
        return None
    start = timeline.marks[FORWARD]
    after = [event for event in timeline.events if event.time_ns >= start.time_ns]
    path, ran = [ROOT], []
    last_ns = after[-1].time_ns if after else start.time_ns
    for entry in timeline.entries:
        if entry.time_ns < start.time_ns:
            continue
        if isinstance(entry, MarkEvent):
            if entry.name.startswith(ENTER):
                path.append(entry.name.removeprefix(ENTER))
            elif entry.name.startswith(LEAVE) and len(path) > 1:
                path.pop()
            continue
        last_ns = max(last_ns, entry.end_ns)
        ran.append(ProfiledCall(entry.time_ns / 1e3, entry.end_ns / 1e3, entry.name, entry.node, path[-1]))
    return MeasuredStep(
        time_us=tuple(change.time_ns / 1e3 for change in (start, *after)),
        live_bytes=tuple(change.live_bytes for change in (start, *after)),
        ran=tuple(ran),
        end_us=last_ns / 1e3,
    )
