"""The dispatch mode that writes down which op ran on what, in forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autoac.planner.formats.constraints import CROSSES
from autoac.planner.formats.profile import DECIDES, PINNED
from autoac.profiler.restore.written_tensors import Originals
from autoac.profiler.torch_facts import private
from autoac.profiler.torch_facts.inductor import SeesCompiled
from autoac.profiler.torch_facts.module_paths import ROOT
from autoac.profiler.torch_facts.op_facts import (
    OpFacts,
    decides,
    facts_of,
    flops_of,
    has_storage,
    has_storage_or_fake,
    outputs_of,
    tensors_in,
    versions,
    written_tensors,
)
from autoac.profiler.torch_facts.pins import MUST_RECOMPUTE, MUST_SAVE
from autoac.profiler.torch_facts.rng import GeneratorState, capture, generator_of
from autoac.profiler.torch_facts.storage_table import StorageTable, Window, disjoint, window_of


@dataclass(slots=True)
class RecordedOp:
    """One op of forward, as it ran."""

    facts: OpFacts
    module: str
    reads: tuple[int, ...]  # values
    signature: tuple[Any, ...]  # calls of one signature do the same work
    random: bool
    flops: int
    must_save: str
    must_recompute: bool = False
    began: int = -1  # mark
    ended: int = -1

    def insist_on_saving(self, why: str) -> None:
        """It can not be run again, whatever else was said of it."""
        self.must_save = self.must_save or why
        self.must_recompute = False


@dataclass(slots=True)
class RecordedValue:
    """One version of a storage that forward made."""

    op: int
    storage: int
    previous: int  # -1: a fresh storage
    newer: int = -1  # the version written over this one; -1: none
    written: Window | None = None  # where it differs from `previous`, if its op does nothing but write there


@dataclass(slots=True)
class RecordedStorage:
    """Memory that forward made, as found right after the op that made it."""

    address: int
    mark: int  # at which it is live
    nbytes: int = 0  # that were asked for; the allocator may give more, and not the same each time


@dataclass(slots=True)
class ForwardRecord:
    """What forward did, in order."""

    ops: list[RecordedOp] = field(default_factory=list)
    values: list[RecordedValue] = field(default_factory=list)
    storages: list[RecordedStorage] = field(default_factory=list)
    forward_ends: list[int] = field(default_factory=list)  # by forward of the model: ops up to its end


class Recorder(SeesCompiled):
    """Records ops while active; `paused` lets what we do ourselves pass unseen."""

    supports_higher_order_operators = True  # they pass as one opaque op

    def __init__(
        self,
        mark: Callable[[], int],
        locate: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.data_ptr,
        has_storage: Callable[[Tensor], bool] = has_storage,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.locate = locate  # the address under which the record of allocations knows a storage
        self.has_storage = has_storage  # which tensors are plain windows on one storage
        self.record = ForwardRecord()
        self.current: StorageTable[int] = StorageTable()  # newest value of each storage
        self.paused = False
        self._compiled = 0  # compiled parts that are running, one inside the other
        self.module = ROOT
        self.pins: Mapping[str, str] = {}  # by module path
        self.originals: Originals | None = None  # what forward is not to change
        self.generators: dict[int, GeneratorState] = {}  # explicit ones, as they were
        self._readers: StorageTable[list[int]] = StorageTable()  # ops that read a storage from outside
        self._in_loss = False
        self._mark = mark

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        facts = facts_of(func)
        if facts.view:
            return func(*args, **kwargs)
        index = len(self.record.ops)
        pin = self.pins.get(self.module)
        must_save = facts.must_save if pin is None else PINNED if pin == MUST_SAVE else ""
        if self._in_loss:
            must_save = must_save or OUTSIDE_OF_MODEL
        written = list(written_tensors(facts, args, kwargs))
        reads: list[int] = []
        for tensor in tensors_in(args, kwargs):
            if not self.has_storage(tensor):
                must_save = must_save or "reads a tensor without a storage of its own"
            elif (value := self.current.get(tensor)) is not None:
                reads.append(value)
                self._note_crossing(value)
            elif not any(tensor is w for w in written):
                self._note_reader(tensor, index)
        draws = facts.draws(args, kwargs)
        if draws:
            self._keep_generator(args, kwargs)
        op = RecordedOp(
            facts,
            self.module,
            tuple(dict.fromkeys(reads)),
            signature_of(facts, args, kwargs),
            draws,
            0,
            must_save,
            pin == MUST_RECOMPUTE,
        )
        self.record.ops.append(op)
        operands = versions((args, kwargs)) if facts.opaque else []
        if self.originals is not None:
            self.originals.keep(facts, args, kwargs)
        op.began = self._mark()
        out = func(*args, **kwargs)
        op.ended = self._mark()
        op.flops = flops_of(func, args, kwargs, out)
        if pin is None and not op.must_save and not draws and decides(facts, args, kwargs, out):
            op.must_save = DECIDES
        written += [tensor for tensor, version in operands if tensor._version != version]
        alone = facts.in_place and len(written) == 1
        for tensor in written:
            self._new_version(tensor, index, alone=alone)
        for tensor in outputs_of(out):
            self._new_output(tensor, index, args, kwargs)
        return out

    def end_forward(self) -> None:
        """Mark the end of one forward of the model."""
        self.record.forward_ends.append(len(self.record.ops))

    def begin_loss(self) -> None:
        """Record what runs from here on as outside of the model, where no plan is carried out."""
        self._in_loss = True

    def _note_crossing(self, value: int) -> None:
        # What a forward reads of one before it (autocast's copy of a weight) it finds held from outside.
        ends, maker = self.record.forward_ends, self.record.values[value].op
        if ends and maker < ends[-1] and not self._in_loss:
            self.record.ops[maker].insist_on_saving(CROSSES_FORWARDS)

    def enter_compiled(self, written: Sequence[Tensor]) -> None:
        """What compiled code runs is no op of the plan, and what it writes is from outside."""
        for tensor in written:
            if self.has_storage(tensor):
                if self.originals is not None:
                    self.originals.keep_storage(tensor)
                self._overwritten(tensor, by=-1)
                self.current.drop(tensor)
        self._compiled += 1
        self.paused = True

    def leave_compiled(self) -> None:
        """Record again."""
        self._compiled -= 1
        self.paused = self._compiled > 0

    def cross_units(self, tensors: Iterable[Tensor]) -> None:
        """What goes into an FSDP unit or comes out of it is saved."""
        for tensor in tensors:
            if self.has_storage(tensor) and (value := self.current.get(tensor)) is not None:
                self.record.ops[self.record.values[value].op].insist_on_saving(CROSSES)

    def _overwritten(self, tensor: Tensor, *, by: int) -> None:
        # What is from outside stays where it is, and what read it before can not be run again.
        for reader in self._readers.get(tensor) or ():
            if reader != by:
                self.record.ops[reader].must_save = "reads what is overwritten later"

    def _new_version(self, tensor: Tensor, op: int, *, alone: bool) -> None:
        if not self.has_storage(tensor):
            return
        previous = self.current.get(tensor)
        if previous is None:
            self._overwritten(tensor, by=op)
            return
        if self.record.values[previous].op == op:
            return  # two views of one storage
        recorded = self.record.ops[op]
        if previous not in recorded.reads:  # an operand of a higher-order op, inside of others
            recorded.reads += (previous,)
        self._add_value(tensor, op, self.record.values[previous].storage, previous)
        if alone:
            self.record.values[-1].written = window_of(tensor)

    def _new_output(self, tensor: Tensor, op: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if not self.has_storage(tensor):
            self.record.ops[op].must_save = "its output has no storage of its own"
            return
        if self.current.get(tensor) is not None:
            return
        storage = tensor.untyped_storage()
        if any(self.has_storage(t) and t.untyped_storage() is storage for t in tensors_in(args, kwargs)):
            return
        found = RecordedStorage(self.locate(storage), self.record.ops[op].ended, storage.nbytes())
        self.record.storages.append(found)
        self._add_value(tensor, op, len(self.record.storages) - 1, -1)

    def _add_value(self, tensor: Tensor, op: int, storage: int, previous: int) -> None:
        self.current.set(tensor, len(self.record.values))
        if previous >= 0:
            self.record.values[previous].newer = len(self.record.values)
        self.record.values.append(RecordedValue(op, storage, previous))

    def _note_reader(self, tensor: Tensor, op: int) -> None:
        readers = self._readers.get(tensor)
        if readers is None:
            readers = []
            self._readers.set(tensor, readers)
        readers.append(op)

    def _keep_generator(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        generator = generator_of(args, kwargs)
        if id(generator) not in self.generators:
            self.generators[id(generator)] = capture(generator)


def signature_of(facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a call does, without its numbers: op, types, shapes and strides. Equal ones do the same work."""

    def describe(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            if arg.is_nested:  # has no shape where its layout is strided
                return ("nested", arg.dtype, arg.numel())
            if not has_storage_or_fake(arg):
                return (str(arg.layout), arg.dtype, tuple(arg.shape))
            return (arg.dtype, tuple(arg.shape), arg.stride())
        if isinstance(arg, (list, tuple)):
            return tuple(describe(item) for item in arg)
        return repr(arg) if not isinstance(arg, torch.Generator) else "generator"

    return (facts.name, *(describe(a) for a in args), *((k, describe(v)) for k, v in sorted(kwargs.items())))


class SavedTensorsRecord:
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
CROSSES_FORWARDS = "another forward reads it"
OUTSIDE_OF_MODEL = "it runs outside of the model"

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
        self, index: int, tensor: Tensor, copy: Tensor | None, owner: weakref.ref[SavedTensorsRecord]
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
