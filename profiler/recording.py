"""torch.profiler over a with-block, and what it recorded: allocations, marks, and which ops ran.

PyTorch's profiler reports each allocation and free of its CPU and CUDA allocators, those inside kernels
included. A mark is a named range in the same record, so what happened between two marks is known
exactly, without a clock of our own.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch._C._profiler import _EventType, _RecordFunctionFast
from torch.profiler import ProfilerActivity

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
        cuda: also wait for CUDA's own activities, so that the record is complete when the block ends.

    Raises:
        ProfilerBusy: another torch profiler is running on this thread.
    """

    def __init__(self, *, cuda: bool = False) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profiler = torch.profiler.profile(activities=activities, profile_memory=True)

    def __enter__(self) -> Self:
        if profiler_is_running():
            raise ProfilerBusy
        os.environ.setdefault("KINETO_LOG_LEVEL", _NO_KINETO_BANNER)  # read when kineto is first used
        self._profiler.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._profiler.__exit__(kind, error, traceback)

    def mark(self, name: str = "") -> None:
        """Name this moment."""
        with _RecordFunctionFast(_MARK + name):
            pass

    def entries(self, ops: Collection[str] = ()) -> Iterator[Entry]:
        """What was recorded, in order of time.

        Args:
            ops: names of ops, `aten::mm`, whose runs are told, and those of all nodes of autograd with them;
                of an op that runs inside another only the outer one. By default neither.
        """
        profiler = self._profiler.profiler
        assert profiler is not None
        assert profiler.kineto_results is not None
        found: list[tuple[Any, bool]] = []
        stack = [(event, False) for event in reversed(profiler.kineto_results.experimental_event_tree())]
        while stack:
            event, inside = stack.pop()
            found.append((event, inside))
            inside = inside or event.name in ops
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


def _returned_ns(node: Any) -> int:
    """When a node's own function returned; then autograd checks and accumulates what it gave out."""
    name = node.name.removeprefix(_NODE)
    return int(next((child for child in node.children if child.name == name), node).end_time_ns)
