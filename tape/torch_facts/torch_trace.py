"""Run torch.profiler over a with-block and read its trace: allocations, marks, and nodes of autograd.

PyTorch's profiler reports each allocation and free of its CPU and CUDA allocators, also inside kernels. A
mark is a named range in the same trace, so the allocations between two marks are known exactly, without a
clock.

NOTE [ Ops are left out of the trace ]
The profiler records the scopes of marks and nodes alone, for which torch.profiler has no argument. The entry
of an op holds its name for as long as the trace is open, in a few bytes of the C library's heap, and these
come to lie in the gaps that aligned allocations leave next to tensors. glibc before 2.39 then cannot reuse
the memory of a freed tensor for another one of its size (sourceware.org, bug 30723). The heap grows far
beyond what the step holds, and the kernel clears all these pages. The trace is shorter, too.

NOTE [ Allocations of other devices need a range around them ]
torch.profiler lists events twice: in a tree, with addresses, and flat, without. In the tree, an event of
the CPU's allocator may stand alone, but an event of another device's allocator appears only inside a
recorded range of its thread. So for such a device one range stays open from beginning to end, for this
thread, and autograd's nodes are recorded, for the thread that runs backward. Events of further threads (a
TorchScript `fork`) are dropped from the tree, but not from the flat list, so `check_complete` compares the
two. (`materializeOpEvents` in profiler_kineto.cpp.)

NOTE [ Ranges of others ]
A range that begins in a trace writes when it ends into the memory of that trace, even if this has been freed
by then, if another trace runs on the thread (pytorch pull request 188172 repairs a case of it). Messages of
a pipeline's stages, whose ranges end where they are waited for, changed eight bytes of a gradient so. So
while a trace runs no range begins but its own, and those of autograd's nodes while backward runs, which end
with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, NamedTuple, Self

import torch

from autoac.tape.errors import CannotProfile, ProfilerBusy
from autoac.tape.torch_facts import private

_MARK = "autoac.mark:"
_WHOLE = "autoac.record"
_MEMORY = "[memory]"
_CPU = private.DeviceType.CPU
_NO_KINETO_BANNER = "6"  # kineto writes a line at start and stop at every lower level


def profiler_is_running() -> bool:
    """Return True if torch.profiler runs on this thread, so that no trace can be taken."""
    return private.profiler_enabled()


class AllocationEvent(NamedTuple):  # of which a trace has tens of thousands
    """An allocation or a free. Times are on the profiler's clock."""

    time_ns: int
    address: int
    nbytes: int  # negative: a free
    device: torch.device


class MarkEvent(NamedTuple):
    """A named point in the trace, placed by `TorchTrace.mark`."""

    time_ns: int
    name: str


class NodeEvent(NamedTuple):
    """The run of a node of autograd."""

    time_ns: int
    end_ns: int
    name: str  # "MmBackward0"


TraceEvent = AllocationEvent | MarkEvent | NodeEvent


class TorchTrace:
    """Trace a with-block. Call `mark()` inside it, and `events()` after it.

    Args:
        device: the device whose allocator is traced; None: every device. The CPU's allocator always is.
        nodes: the runs of autograd's nodes are traced where `backward_runs` says so.

    Raises:
        ProfilerBusy: another torch profiler is running on this thread.
    """

    def __init__(self, device: torch.device | None = None, *, nodes: bool = False) -> None:
        self._ranged = device is None or device.type != "cpu"
        self._range: Any = None  # open on this thread; NOTE [ Allocations of other devices need a range ... ]
        self._nodes = nodes
        # NOTE [ Ranges of others ]. On a GPU, allocations in a backward that nobody tells of need its nodes.
        self._is_quiet = nodes or not self._ranged
        self._in_backward = False
        # Without CUDA's activities: the allocator reports on the host, and no kernel needs to be traced.
        self._settings = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
        self._results: Any = None

    def __enter__(self) -> Self:
        if profiler_is_running():
            raise ProfilerBusy
        os.environ.setdefault("KINETO_LOG_LEVEL", _NO_KINETO_BANNER)  # read when kineto is first used
        config, activities = self._settings.config(create_trace_id=True), self._settings.kineto_activities
        private.prepare_profiler(config, activities)
        scopes = {private.RecordScope.USER_SCOPE}
        if self._ranged or self._nodes:
            scopes.add(private.RecordScope.BACKWARD_FUNCTION)
        private.enable_profiler(config, activities, scopes)
        if self._ranged:
            self._range = private.begin_range(_WHOLE)
        if self._is_quiet:
            private.record_ranges(False)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._is_quiet:
            private.record_ranges(True)
        if self._ranged:
            private.end_range(self._range)
            self._range = None
        self._results = private.disable_profiler()

    def mark(self, name: str = "") -> None:
        """Place a point called `name` in the trace, which becomes a MarkEvent."""
        hidden = self._is_quiet and not self._in_backward
        if hidden:
            private.record_ranges(True)
        private.end_range(private.begin_range(_MARK + name))
        if hidden:
            private.record_ranges(False)

    def backward_runs(self, begins: bool) -> None:
        """Trace the nodes of a backward that is called on this thread; `begins` is False when it returns."""
        self._in_backward = begins
        if self._is_quiet:
            private.record_ranges(begins)

    def check_complete(self, where: str) -> None:
        """Compare the allocations of `events`, without the CPU's, with torch.profiler's flat list of events.

        See NOTE [ Allocations of other devices need a range around them ].

        Args:
            where: names the traced code in the error.

        Raises:
            CannotProfile: `events` lacks some of them.
        """
        if not self._ranged:
            return
        listed = sum(
            event.name() == _MEMORY and event.device_type() != _CPU for event in self._results.events()
        )
        in_tree = sum(
            type(fields) is private.AllocationFields and fields.device.type != "cpu"
            for _, _, fields in self._walk()
        )
        if in_tree != listed:
            raise CannotProfile(
                where,
                f"{listed - in_tree} of its {listed} allocations and frees happen on threads that "
                "torch.profiler assigns to no range (such as those of torch.jit.fork)",
                "run that part on the thread that calls forward",
            )

    def events(self) -> Iterator[TraceEvent]:
        """Yield the events in order of time."""
        for time_ns, event, fields in sorted(self._walk(), key=itemgetter(0)):
            if type(fields) is private.AllocationFields:
                yield AllocationEvent(time_ns, fields.ptr, fields.alloc_size, fields.device)
            elif type(fields) is not private.OpFields:  # on a GPU, calls of its runtime
                continue
            elif (name := event.name).startswith(_MARK):
                yield MarkEvent(time_ns, name.removeprefix(_MARK))
            elif self._nodes and fields.scope == private.RecordScope.BACKWARD_FUNCTION:
                # The range around a node has another scope, and is not recorded.
                yield NodeEvent(time_ns, event.end_time_ns, name)

    def _walk(self) -> Iterator[tuple[int, Any, Any]]:
        """Yield every event of the tree: its time, itself, its fields."""
        levels = [iter(self._results.experimental_event_tree())]
        while levels:
            for event in levels[-1]:
                yield event.start_time_ns, event, event.extra_fields
                if children := event.children:
                    levels.append(iter(children))
                    break
            else:
                levels.pop()
