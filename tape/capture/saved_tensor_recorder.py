"""Record what autograd saves, and keep descriptions in place of the activations: saved-tensor hooks.

NOTE [ What replaces a saved tensor ]
A floating-point activation becomes a description: size, strides, type. Backward gets ones of that
description, so every kernel runs, on meaningless numbers. Integer and bool tensors index and decide, so
they are copied, except for bytes that encode floating-point numbers. External tensors (parameters, inputs)
are kept as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoac.tape.capture.op_recorder import OpRecorder, RecordedStorage
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.inductor import keep_dynamo_out
from autoac.tape.torch_facts.storage_table import Window, disjoint, window_of

UNPACKED = "a backward inside forward reads it"
DIFFERENTIATED = "a hook of backward differentiates it"

_WHOLE = Window(0, 1, (1,), (0,))  # compiled code writes no part of a storage, so any window will do
_BYTE_OF_ONES = 0x3F  # four of these bytes are 0.747 in float32, two are 0.746 in bfloat16


@dataclass(slots=True)
class SavedEvent:
    """An unpack or a drop of a saved tensor."""

    kind: str  # "unpack" or "drop"
    saved: int
    mark: int
    node: str  # autograd node that unpacked it
    task: int = -1  # the graph task of backward that unpacked it
    end_mark: int = -1  # of an unpack
    stand_in: RecordedStorage | None = None  # the ones that backward got in place of the activation
    kept: bool | None = None  # the region of an observed step goes on holding what it returned
    freed_mark: int = -1  # in an observed step: mark at which that was freed
    # Of an unpack by a backward inside of forward: how many ops had begun when its node returned.
    needed_until: int = 0


class SavedTensorRecorder:
    """Record each saved tensor of forward, its unpacks and its drop.

    Attributes:
        versions: by saved tensor, the version of its storage that was saved.
        packed: by saved tensor, how many ops had started.
        events: unpacks and drops, in order.
        copies: storages that only the profiler allocates.
        kernels: pairs of marks. What is allocated and freed in between takes no memory in compiled code.
        closed: True once the step is over: drops no longer count.
        forward_over: False while an unpack belongs to a backward that the model runs inside forward.
        can_run: returns True if an op of a module could run now.
        out_of_reach: ops whose output was unpacked while they could not run.
    """

    def __init__(self, recorder: OpRecorder, mark: Callable[[], int]) -> None:
        self._recorder = recorder
        self._mark = mark
        self._windows: list[Window] = []  # by saved tensor
        self.versions: list[int] = []
        self.packed: list[int] = []
        self.events: list[SavedEvent] = []
        self.copies: list[RecordedStorage] = []
        self.kernels: list[tuple[int, int]] = []
        self.closed = False
        self.forward_over = False
        self.can_run: Callable[[str], bool] = lambda _module: True
        self.out_of_reach: set[int] = set()

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd holds in place of `tensor`."""
        if not self.sees(tensor, 3):
            return tensor
        index = self.add_tensor(tensor)
        version = self.versions[index]
        floats = tensor.is_floating_point() or tensor.is_complex() or self._encodes_floats(tensor, version)
        return _Description(index, tensor, None if floats else self.copy_of(tensor), weakref.ref(self))

    def sees(self, tensor: Tensor, depth: int) -> bool:
        """Return True if `tensor`, which autograd packs, is one that forward made.

        Args:
            depth: as for `FunctionCall.is_forward_over`.
        """
        recorder = self._recorder
        return (
            recorder.note_pack(tensor, depth)
            and recorder.has_storage(tensor)
            and recorder.newest.get(tensor) is not None
        )

    def add_tensor(self, tensor: Tensor) -> int:
        """Record that autograd saves `tensor`, which forward made; return the number of the saved tensor."""
        recorder = self._recorder
        version = recorder.newest.get(tensor)
        assert version is not None
        recorder.note_stream(version)
        recorder.note_contents(version)
        self.versions.append(version)
        self.packed.append(len(recorder.record.ops))
        self._windows.append(window_of(tensor))
        return len(self.versions) - 1

    def add(self, version: int) -> int:
        """Record that compiled code saves all of `version`, and return the number of the saved tensor."""
        self.versions.append(version)
        self.packed.append(len(self._recorder.record.ops))
        self._windows.append(_WHOLE)
        return len(self.versions) - 1

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of a saved tensor whose numbers index or decide. A real step has no such copy."""
        with _paused(self._recorder):
            content = tensor.detach().clone()
        self.copies.append(RecordedStorage(self._recorder.locate(content.untyped_storage()), self._mark()))
        return content

    def compiled_copy_of(self, tensor: Tensor) -> Tensor:
        """Return a channels-last copy of a tensor. Compiled code makes this copy in each step."""
        with _paused(self._recorder):
            return tensor.detach().clone(memory_format=torch.channels_last)

    def hide(self, tensor: Tensor) -> None:
        """Leave out the memory of a value that compiled code has in registers."""
        self.copies.append(RecordedStorage(self._recorder.locate(tensor.untyped_storage()), self._mark()))

    @contextmanager
    def one_kernel(self) -> Iterator[None]:
        """Leave out temporaries of the node inside, which compiled code has in registers."""
        begin = self._mark()
        yield
        self.kernels.append((begin, self._mark()))

    def unpack_as(self, saved: int, make: Callable[[], Tensor], node: str, *, made: bool) -> Tensor:
        """Record that `node` of compiled code reads a saved tensor, and return its stand-in.

        Args:
            make: returns the stand-in.
            made: it allocates the stand-in.
        """
        event = SavedEvent("unpack", saved, self._mark(), node)
        self.events.append(event)
        with _paused(self._recorder):
            tensor = make()
        event.end_mark = self._mark()
        if made:
            event.stand_in = RecordedStorage(self._recorder.locate(tensor.untyped_storage()), event.end_mark)
            self.copies.append(event.stand_in)
        return tensor

    def _encodes_floats(self, tensor: Tensor, version: int) -> bool:
        """Return True if the bytes of `tensor` are floating-point numbers."""
        record = self._recorder.record
        writer = record.ops[record.versions[version].op]
        return tensor.dtype is torch.uint8 and writer.facts.numbers_as_bytes

    def unpack(self, packed: Any) -> Tensor:
        """Return what a node of backward gets: the tensor, its copy, or ones of its description."""
        if not isinstance(packed, _Description):
            tensor: Tensor = packed
            return tensor
        event = self.begin_unpack(packed.index)
        recorder = self._recorder
        if packed.content is not None:
            event.end_mark = self._mark()
            return self.note_unpack_in_forward(packed.content, packed.index)
        with _paused(recorder):
            ones = torch.empty_strided(packed.size, packed.stride, dtype=packed.dtype, device=packed.device)
            # Not zeros: some kernels (prod) take another path on them.
            ones.fill_(1 if packed.dtype is not torch.uint8 else _BYTE_OF_ONES)
        event.end_mark = self._mark()
        event.stand_in = RecordedStorage(recorder.locate(ones.untyped_storage()), event.end_mark)
        self.copies.append(event.stand_in)
        ones = private.neg_view(ones) if packed.negative else ones
        return self.note_unpack_in_forward(ones.conj() if packed.conjugate else ones, packed.index)

    def begin_unpack(self, saved: int, name: str = "") -> SavedEvent:
        """Record that a node of backward asks for a saved tensor: by default, autograd's own that runs."""
        node = private.current_autograd_node()
        name = name or (node.name() if node is not None else "")
        event = SavedEvent("unpack", saved, self._mark(), name)
        if self.forward_over:
            event.task = private.current_graph_task_id()
        self.events.append(event)
        record = self._recorder.record
        writer = record.versions[self.versions[saved]].op
        if not self.can_run(record.ops[writer].module):
            self.out_of_reach.add(writer)
        return event

    def note_unpack_in_forward(self, tensor: Tensor, saved: int) -> Tensor:
        """Return `tensor`, which was unpacked.

        If forward unpacked it, ops that read it read the saved version, and the op that wrote this version
        must be saved: a plan has no recompute in forward.
        """
        if not self.forward_over:
            version = self.versions[saved]
            self._recorder.newest.set(tensor, version)
            self._recorder.force_save(version, UNPACKED)
        return tensor

    @property
    def first_task(self) -> int:
        """Return the graph task of backward that began first; -1: none has unpacked anything."""
        return min((event.task for event in self.events if event.task >= 0), default=-1)

    def save_differentiated(self) -> None:
        """Have the ops saved that made what a hook of backward differentiates.

        Such a hook runs graph tasks of its own. The runtime recomputes for each graph task separately, but
        the schedule of a plan has a single task.
        """
        first = self.first_task
        for event in self.events:
            if event.task > first:
                self._recorder.force_save(self.versions[event.saved], DIFFERENTIATED)

    def newest_unchanged(self, saved: int, until_op: int) -> int:
        """Return the newest version in which the bytes of saved tensor `saved` are still those it had.

        Writes to other parts of the storage make such versions. So do all writes of collectives and of
        Functions: they advance no version counter, and backward gets what they wrote. Only writes before op
        `until_op` count: there autograd dropped the saved tensor.
        """
        version = self.versions[saved]
        record = self._recorder.record
        while (following := record.versions[version].next) >= 0:
            window, writer = record.versions[following].window, record.versions[following].op
            facts = record.ops[writer].facts
            if not (facts.collective or facts.function) and (
                window is None or not disjoint(window, self._windows[saved])
            ):
                break
            if writer >= until_op:
                break
            version = following
        return version

    def note_drop(self, index: int) -> None:
        """Record that autograd dropped saved tensor `index`."""
        if not self.closed:
            self.events.append(SavedEvent("drop", index, self._mark(), ""))


class _Description:
    """Stand in for a saved tensor in autograd's graph. Deleting the handle is the drop."""

    __slots__ = ("conjugate", "content", "device", "dtype", "index", "negative", "owner", "size", "stride")

    def __init__(
        self, index: int, tensor: Tensor, content: Tensor | None, owner: weakref.ref[SavedTensorRecorder]
    ) -> None:
        self.index, self.content, self.owner = index, content, owner
        self.size, self.stride = tensor.size(), tensor.stride()
        self.dtype, self.device = tensor.dtype, tensor.device
        self.conjugate, self.negative = tensor.is_conj(), tensor.is_neg()

    def __del__(self) -> None:
        owner = self.owner()
        if owner is not None:
            owner.note_drop(self.index)


for _function in (SavedTensorRecorder.pack, SavedTensorRecorder.unpack, _Description.__del__):
    keep_dynamo_out(_function, "it records a step", recursively=True)


@contextmanager
def _paused(recorder: OpRecorder) -> Iterator[None]:
    """Run ops of the profiler's own, which are not recorded."""
    before, recorder.paused = recorder.paused, True
    try:
        yield
    finally:
        recorder.paused = before
