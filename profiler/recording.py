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
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import RecordScope, _EventType

from autoac.profiler.errors import ProfilerBusy

_MARK = "autoac.mark:"
_NODE = "autograd::engine::evaluate_function: "
_NO_KINETO_BANNER = "6"  # kineto writes a line at start and stop at every lower level


def profiler_is_running() -> bool:
    """Whether torch.profiler runs on this thread, so that no record can be taken."""
    return torch._C._autograd._profiler_enabled()


@dataclass(frozen=True, slots=True)
class Allocated:
    """The allocator gave out memory or took it back. Times are on the profiler's clock."""

    time_ns: int
    address: int
    nbytes: int  # negative: a free
    device: torch.device


@dataclass(frozen=True, slots=True)
class Marked:
    """A mark was placed."""

    time_ns: int
    name: str


@dataclass(frozen=True, slots=True)
class Ran:
    """An op, or a node of autograd from its first unpack until its function returned."""

    time_ns: int
    ended_ns: int
    name: str  # "aten::mm"; of a node "MmBackward0"
    node: bool


Entry = Allocated | Marked | Ran


class Recording:
    """Use as a context manager; `mark()` inside it, `entries()` after it.

    Args:
        ops: names of ops, `aten::mm`, whose runs `entries` is to tell, and those of all nodes of autograd
            with them. By default neither is recorded (NOTE [ Ops are left out of the record ]).

    Raises:
        ProfilerBusy: another torch profiler is running on this thread.
    """

    def __init__(self, ops: Collection[str] = ()) -> None:
        self._ops = frozenset(ops)
        # Without CUDA's own activities: the host's allocator reports, and no kernel needs to be traced.
        self._settings = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
        self._results: Any = None

    def __enter__(self) -> Self:
        if profiler_is_running():
            raise ProfilerBusy
        os.environ.setdefault("KINETO_LOG_LEVEL", _NO_KINETO_BANNER)  # read when kineto is first used
        config, activities = self._settings.config(create_trace_id=True), self._settings.kineto_activities
        _prepare_profiler(config, activities)
        scopes = set() if self._ops else {RecordScope.USER_SCOPE}
        _enable_profiler(config, activities, scopes)  # type: ignore[call-arg]  # the stub lacks them
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._results = _disable_profiler()

    def mark(self, name: str = "") -> None:
        """Name this moment."""
        unseen = torch._C._DisableTorchDispatch()  # by modes
        with torch._C.DisableTorchFunctionSubclass():
            _end_range(_begin_range(_MARK + name, None))
        del unseen

    def entries(self) -> Iterator[Entry]:
        """What was recorded, in order of time. Of an op that runs inside another only the outer one."""
        ops = self._ops
        found: list[tuple[Any, bool]] = []
        stack = [(event, False) for event in reversed(self._results.experimental_event_tree())]
        while stack:
            event, inside = stack.pop()
            found.append((event, inside))
            inside = inside or (bool(ops) and event.name in ops)
            stack.extend((child, inside) for child in reversed(event.children))
        found.sort(key=lambda entry: int(entry[0].start_time_ns))
        for event, inside in found:
            time_ns = int(event.start_time_ns)
            if event.tag == _EventType.Allocation:
                fields = event.typed[1]
                yield Allocated(time_ns, fields.ptr, fields.alloc_size, fields.device)
            elif (name := event.name).startswith(_MARK):
                yield Marked(time_ns, name.removeprefix(_MARK))
            elif ops and not inside:
                if name in ops:
                    yield Ran(time_ns, int(event.end_time_ns), name, node=False)
                elif name.startswith(_NODE):
                    yield Ran(time_ns, _returned_ns(event), name.removeprefix(_NODE), node=True)


_begin_range: Callable[..., Any] = torch.ops.profiler._record_function_enter_new.default._op
_end_range: Callable[..., Any] = torch.ops.profiler._record_function_exit._RecordFunction._op


def _returned_ns(node: Any) -> int:
    """When a node's own function returned; then autograd checks and accumulates what it gave out."""
    name = node.name.removeprefix(_NODE)
    return int(next((child for child in node.children if child.name == name), node).end_time_ns)
