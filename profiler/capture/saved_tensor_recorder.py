"""The saved-tensor hooks of a profiled step, which keep descriptions in place of activations."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoac.profiler.capture.op_recorder import RecordedStorage, Recorder
from autoac.profiler.torch_facts import private
from autoac.profiler.torch_facts.storage_table import Window, disjoint, window_of


class SavedTensorRecorder:
    """Saved-tensor hooks that keep of each floating-point activation only what describes it.

    Parameters, inputs and all that no recorded op made are kept as they are. Integer and bool tensors
    index and decide, so a copy of them is kept, unless they are numbers in disguise. Backward so runs every
    kernel, on ones. With `keep` all are kept as they are, at the same marks: a plain step.
    """

    def __init__(self, recorder: Recorder, mark: Callable[[], int], *, keep: bool = False) -> None:
        self._recorder = recorder
        self._mark = mark
        self._keep = keep
        self.values: list[int] = []  # by saved tensor
        self.packed: list[int] = []  # ops that had started
        self.windows: list[Window] = []
        self.events: list[SavedEvent] = []
        self.copies: list[RecordedStorage] = []  # made by us: no step without us has them
        self.closed = False
        self.forward_over = False  # until then what unpacks is a backward that the model runs in its forward
        self.may_be_made: Callable[[str], bool] = lambda _module: True  # whether an op there could run now
        self.out_of_reach: set[int] = set()  # ops whose output was unpacked when it could not be made again

    def pack(self, tensor: Tensor) -> Any:
        if not self._recorder.has_storage(tensor) or (value := self._recorder.current.get(tensor)) is None:
            return tensor
        index = len(self.values)
        self.values.append(value)
        self.packed.append(len(self._recorder.record.ops))
        self.windows.append(window_of(tensor))
        copy = None
        copied = not (tensor.is_floating_point() or tensor.is_complex() or self._numbers(tensor, value))
        if self._keep:
            copy = tensor
            if copied:
                self._mark()  # where a hollow step has made its copy
        elif copied:
            with _paused(self._recorder):
                copy = tensor.detach().clone()
            self.copies.append(RecordedStorage(self._recorder.locate(copy.untyped_storage()), self._mark()))
        return _HollowHandle(index, tensor, copy, weakref.ref(self))

    def _numbers(self, tensor: Tensor, value: int) -> bool:
        """Whether the bytes of `tensor` are floating-point numbers."""
        record = self._recorder.record
        return tensor.dtype is torch.uint8 and record.ops[record.values[value].op].facts.numbers_as_bytes

    def unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _HollowHandle):
            tensor: Tensor = packed
            return tensor
        node = private.current_autograd_node()
        event = SavedEvent("unpack", packed.index, self._mark(), node.name() if node is not None else "")
        self.events.append(event)
        maker = self._recorder.record.values[self.values[packed.index]].op
        if not self.may_be_made(self._recorder.record.ops[maker].module):
            self.out_of_reach.add(maker)
        if packed.copy is not None:
            event.ended = self._mark()
            return self._given(packed.copy, packed)
        with _paused(self._recorder):
            fresh = torch.empty_strided(packed.size, packed.stride, dtype=packed.dtype, device=packed.device)
            # Zeros send some kernels (prod) along a path of their own.
            fresh.fill_(1 if packed.dtype is not torch.uint8 else _BYTE_OF_NUMBERS)
        event.ended = self._mark()
        event.stand_in = RecordedStorage(self._recorder.locate(fresh.untyped_storage()), event.ended)
        self.copies.append(event.stand_in)
        fresh = private.neg_view(fresh) if packed.negative else fresh
        return self._given(fresh.conj() if packed.conjugate else fresh, packed)

    def _given(self, tensor: Tensor, packed: _HollowHandle) -> Tensor:
        """What an unpack hands out. In forward it is the value, for the ops that read it and for autograd.

        A plan has no recompute in forward, so the value is saved.
        """
        if not self.forward_over:
            value = self.values[packed.index]
            self._recorder.current.set(tensor, value)
            self._recorder.record.ops[self._recorder.record.values[value].op].insist_on_saving(UNPACKED)
        return tensor

    def shown(self, saved: int, dropped: int) -> int:
        """Return the newest value that shows what autograd saved as saved tensor `saved`.

        Writes elsewhere in its storage have made newer versions than the one that it was saved of. Those
        count that came before op `dropped`, where autograd let go of it.
        """
        value = self.values[saved]
        values = self._recorder.record.values
        while (newer := values[value].newer) >= 0:
            written = values[newer].written
            if values[newer].op >= dropped or written is None or not disjoint(written, self.windows[saved]):
                break
            value = newer
        return value

    def dropped(self, index: int) -> None:
        if not self.closed:
            self.events.append(SavedEvent("drop", index, self._mark(), ""))


UNPACKED = "a backward inside forward reads it"

_BYTE_OF_NUMBERS = 0x3F  # four of them are 0.747 in float32, two are 0.746 in bfloat16


@dataclass(slots=True)
class SavedEvent:
    """An unpack or a drop of a saved tensor."""

    kind: str
    saved: int
    mark: int
    node: str  # autograd node that unpacked it
    ended: int = -1  # mark at which an unpack was over
    stand_in: RecordedStorage | None = None  # what an unpack handed out in place of the activation


class _HollowHandle:
    """What autograd holds in place of a saved tensor."""

    __slots__ = ("conjugate", "copy", "device", "dtype", "index", "negative", "owner", "size", "stride")

    def __init__(
        self, index: int, tensor: Tensor, copy: Tensor | None, owner: weakref.ref[SavedTensorRecorder]
    ) -> None:
        self.index, self.copy, self.owner = index, copy, owner
        self.size, self.stride = tensor.size(), tensor.stride()
        self.dtype, self.device = tensor.dtype, tensor.device
        self.conjugate, self.negative = tensor.is_conj(), tensor.is_neg()

    def __del__(self) -> None:
        owner = self.owner()
        if owner is not None:
            owner.dropped(self.index)


class _paused:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder.paused = True

    def __exit__(self, *_: Any) -> None:
        self._recorder.paused = False
