"""torch.profiler over a with-block, and what it recorded: allocations, marks, and which ops ran.

PyTorch's profiler reports each allocation and free of its CPU and CUDA allocators, those inside kernels
included. A mark is a named range in the same record, so what happened between two marks is known
exactly, without a clock of our own.

NOTE [ Ops are left out of the record ]
Unless somebody asks which ops ran, the profiler is told to record the scope of marks alone, which
torch.profiler has no argument for. An op's entry holds its name for as long as the record is open, in a few
bytes of the C library's heap, and those come to lie in the gaps that aligned allocations leave beside
tensors. glibc before 2.39 then finds no room in what a tensor gave back for another of its size
(sourceware.org, bug 30723) and lets the heap grow, far beyond what the step holds, and the kernel empties all
these pages. The record is shorter, too.

NOTE [ Allocations of other devices need a range around them ]
torch.profiler lists events twice: in a tree, with addresses, and flat, without. In the tree an event of the
CPU's allocator may stand alone. An event of another device's allocator appears only inside a recorded range
of its thread, and is dropped elsewhere. So for such a device one range stays open from the beginning to the
end, which covers this thread; and autograd's nodes are recorded, which covers the thread that runs backward
on that device. Code that allocates on further threads (a TorchScript `fork`) is still dropped. The flat list
has these events too, so `check_complete` compares the two. (`materializeOpEvents` in profiler_kineto.cpp.)
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from autoac.profiler.errors import CannotProfile, ProfilerBusy
from autoac.profiler.torch_facts import private

_MARK = "autoac.mark:"
_WHOLE = "autoac.record"
_MEMORY = "[memory]"
_CPU = private.DeviceType.CPU
_NODE = "autograd::engine::evaluate_function: "
_NO_KINETO_BANNER = "6"  # kineto writes a line at start and stop at every lower level


def profiler_is_running() -> bool:
    """Whether torch.profiler runs on this thread, so that no record can be taken."""
    return private.profiler_enabled()


@dataclass(frozen=True, slots=True)
class AllocationEvent:
    """The allocator gave out memory or took it back. Times are on the profiler's clock."""

    time_ns: int
    address: int
    nbytes: int  # negative: a free
    device: torch.device


@dataclass(frozen=True, slots=True)
class MarkEvent:
    """A mark was placed."""

    time_ns: int
    name: str


@dataclass(frozen=True, slots=True)
class OpEvent:
    """An op, or a node of autograd from its first unpack until its function returned."""

    time_ns: int
    ended_ns: int
    name: str  # "aten::mm"; of a node "MmBackward0"
    node: bool


TraceEvent = AllocationEvent | MarkEvent | OpEvent


class TorchTrace:
    """Use as a context manager; `mark()` inside it, `events()` after it.

    Args:
        device: whose allocator is recorded; None: every device's. The CPU's is always in the record.
        ops: names of ops, `aten::mm`, whose runs `events` is to tell, and those of all nodes of autograd
            with them. By default neither is recorded (NOTE [ Ops are left out of the record ]).

    Raises:
        ProfilerBusy: another torch profiler is running on this thread.
    """

    def __init__(self, device: torch.device | None = None, *, ops: Collection[str] = ()) -> None:
        self._ranged = device is None or device.type != "cpu"
        self._range: Any = None  # open on this thread; NOTE [ Allocations of other devices need a range ... ]
        self._ops = frozenset(ops)
        # Without CUDA's own activities: the host's allocator reports, and no kernel needs to be traced.
        self._settings = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
        self._results: Any = None

    def __enter__(self) -> Self:
        if profiler_is_running():
            raise ProfilerBusy
        os.environ.setdefault("KINETO_LOG_LEVEL", _NO_KINETO_BANNER)  # read when kineto is first used
        config, activities = self._settings.config(create_trace_id=True), self._settings.kineto_activities
        private.prepare_profiler(config, activities)
        scopes = {private.RecordScope.USER_SCOPE}
        if self._ranged:
            scopes.add(private.RecordScope.BACKWARD_FUNCTION)
        private.enable_profiler(config, activities, set() if self._ops else scopes)
        if self._ranged:
            with _unseen():
                self._range = private.begin_range(_WHOLE, None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ranged:
            with _unseen():
                private.end_range(self._range)
            self._range = None
        self._results = private.disable_profiler()

    def mark(self, name: str = "") -> None:
        """Name this moment."""
        with _unseen():
            private.end_range(private.begin_range(_MARK + name, None))

    def check_complete(self, where: str) -> None:
        """Compare the allocations of `events`, but the CPU's, with torch.profiler's flat list of events.

        See NOTE [ Allocations of other devices need a range around them ].

        Args:
            where: what was recorded, for the error.

        Raises:
            CannotProfile: `events` lacks some.
        """
        if not self._ranged:
            return
        listed = sum(
            event.name() == _MEMORY and event.device_type() != _CPU for event in self._results.events()
        )
        found = sum(
            event.tag == private.EventType.Allocation and event.typed[1].device.type != "cpu"
            for event, _ in self._walk()
        )
        if found != listed:
            raise CannotProfile(
                where,
                f"{listed - found} of its {listed} allocations and frees happen on threads that "
                "torch.profiler assigns to no range (such as those of torch.jit.fork)",
                "run that part on the thread that calls forward",
            )

    def events(self) -> Iterator[TraceEvent]:
        """What was recorded, in order of time. Of an op that runs inside another only the outer one."""
        ops = self._ops
        for event, inside in sorted(self._walk(), key=lambda found: int(found[0].start_time_ns)):
            time_ns = int(event.start_time_ns)
            if event.tag == private.EventType.Allocation:
                fields = event.typed[1]
                yield AllocationEvent(time_ns, fields.ptr, fields.alloc_size, fields.device)
            elif (name := event.name).startswith(_MARK):
                yield MarkEvent(time_ns, name.removeprefix(_MARK))
            elif ops and not inside:
                if name in ops:
                    yield OpEvent(time_ns, int(event.end_time_ns), name, node=False)
                elif name.startswith(_NODE):
                    yield OpEvent(time_ns, _returned_ns(event), name.removeprefix(_NODE), node=True)

    def _walk(self) -> Iterator[tuple[Any, bool]]:
        """Every event of the tree, and whether it lies inside one of the ops that were asked for."""
        ops = self._ops
        stack = [(event, False) for event in reversed(self._results.experimental_event_tree())]
        while stack:
            event, inside = stack.pop()
            yield event, inside
            inside = inside or (bool(ops) and event.name in ops)
            stack.extend((child, inside) for child in reversed(event.children))


@contextmanager
def _unseen() -> Iterator[None]:
    """Hide the ops inside from modes."""
    unseen = private.DisableTorchDispatch()
    with private.DisableTorchFunctionSubclass():
        yield
    del unseen


def _returned_ns(node: Any) -> int:
    """When a node's own function returned; then autograd checks and accumulates what it gave out."""
    name = node.name.removeprefix(_NODE)
    return int(next((child for child in node.children if child.name == name), node).end_time_ns)
