"""The dispatch mode that writes down which op ran on what, in forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autoac.planner.formats.profile import CROSSES, DECIDES, PINNED
from autoac.profiler.restore.written_tensors import Originals
from autoac.profiler.torch_facts.inductor import RecordingMode
from autoac.profiler.torch_facts.module_paths import ROOT
from autoac.profiler.torch_facts.module_pins import MUST_RECOMPUTE, MUST_SAVE
from autoac.profiler.torch_facts.op_facts import OpFacts, decides, facts_of, versions, written_tensors
from autoac.profiler.torch_facts.op_signature import flops_of, outputs_of, signature_of, tensors_in
from autoac.profiler.torch_facts.rng import GeneratorState, capture_generator, generator_of
from autoac.profiler.torch_facts.storage_table import (
    StorageTable,
    Window,
    has_storage,
    window_of,
)

CROSSES_FORWARDS = "another forward reads it"
OUTSIDE_OF_MODEL = "it runs outside of the model"


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


class Recorder(RecordingMode):
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
            signature_of(facts.name, args, kwargs),
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
            self.generators[id(generator)] = capture_generator(generator)
