"""Record which op of forward ran on what.

Each in-place write gives a storage a new *version*, and an op reads versions. A storage that forward did not
make (a parameter, the batch) has no version: the record calls it *external*.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoac.planner.formats.profile import (
    ANOTHER_GRAPH,
    CROSSES,
    DECIDES,
    LIFTABLE,
    OVERWRITTEN,
    PINNED,
    UNSEEN,
    WRITES_ARGUMENTS,
)
from autoac.tape.checkpoints.own_checkpoints import need_checkpoints, running_call
from autoac.tape.distributed.process_groups import note_groups, note_mesh
from autoac.tape.distributed.wrapped_tensors import below
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.batch_contents import batch_tensors
from autoac.tape.torch_facts.module_paths import ROOT
from autoac.tape.torch_facts.module_pins import MUST_RECOMPUTE, MUST_SAVE
from autoac.tape.torch_facts.op_facts import (
    OpFacts,
    decides,
    old_statistics,
    tensor_versions,
    unread_argument,
    written_tensors,
)
from autoac.tape.torch_facts.op_signature import Args, Kwargs, flops_of, outputs_of, signature_of, tensors_in
from autoac.tape.torch_facts.rng import UsedGenerators, generator_of
from autoac.tape.torch_facts.storage_table import StorageTable, has_storage
from autoac.tape.torch_facts.streams import has_streams
from autoac.tape.torch_facts.view_recipes import Recipe, recipe_of
from autoac.tape.unseen.function_calls import SMALL, FunctionCall
from autoac.tape.unseen.moving_weights import MOVES, Memory, memory_of, moving_weights, parameter_of

CROSSES_FORWARDS = "another forward reads it"
CROSSES_STREAMS = "another stream reads it"
BETWEEN_GRAPHS = "it runs between compiled graphs"
OUTSIDE_OF_MODEL = "it runs outside of the model"
RESIZED = "the model changes the size of its storage"
TEMPORARY = "it reads memory that the model frees at once"


@dataclass(slots=True)
class RecordedOp:
    """One op of forward, as it ran.

    Invariant: every version in `reads` was written by an earlier op.
    """

    facts: OpFacts
    module: str
    reads: tuple[int, ...]  # versions
    signature: tuple[Any, ...]  # calls with equal signatures do the same work
    random: bool
    flops: int
    must_save: str  # the reason; "" if its outputs need not be saved
    must_recompute: bool = False
    stream: int = 0
    compiled: bool = False  # part of a graph of torch.compile
    time_share: float = 1.0  # of its run time that remains where it is fused with its neighbors
    begins_graph: bool = False  # the first op of a call of such a graph
    workspace: int = 0  # bytes that it holds if it runs again, in addition to what it held here
    begin_mark: int = -1
    end_mark: int = -1

    def force_save(self, reason: str) -> None:
        """Mark the op as one that cannot run again, which overrides a pin."""
        self.must_save = reason if self.must_save in LIFTABLE else self.must_save
        self.must_recompute = False


@dataclass(frozen=True, slots=True)
class RunningOp:
    """An op from `OpRecorder.begin` to `end`."""

    op: RecordedOp
    written: list[Tensor]
    operands: list[tuple[Tensor, int]]  # of a higher-order op, each with its version counter


@dataclass(slots=True)
class RecordedVersion:
    """The contents of a storage between two in-place writes of forward."""

    op: int  # that wrote it
    storage: int
    previous: int  # the version it overwrote; -1: the storage is new
    next: int = -1  # the version that overwrote it; -1: none
    window: Recipe | None = None  # where it differs from `previous`; None: anywhere
    blank: bool = False  # nobody has written it, as far as is seen


@dataclass(slots=True)
class RecordedStorage:
    """Memory that forward allocated, as found right after the op that allocated it."""

    address: int
    mark: int  # at which it is live
    nbytes: int = 0  # requested; the allocator may round up, and not always to the same size
    let_go: int = -1  # mark at which only the region of an observed step held it
    let_go_before: int = -1  # how many ops had begun then


@dataclass(slots=True)
class ForwardRecord:
    """The ops, versions and storages of forward, in order."""

    ops: list[RecordedOp] = field(default_factory=list)
    versions: list[RecordedVersion] = field(default_factory=list)
    storages: list[RecordedStorage] = field(default_factory=list)
    outputs: list[tuple[int, int]] = field(default_factory=list)  # of the model: position, storage
    forward_ends: list[int] = field(default_factory=list)  # by forward of the model: ops up to its end


class OpRecorder:
    """Record the ops that a region runs (step_tape.py).

    Attributes:
        locate: returns the address under which the record of allocations knows a storage.
        record: the result.
        newest: the newest version of each storage that forward made.
        module: path of the module that is running.
        pins: the pins of the user, by module path.
        generators: the generators that forward drew from.
        compiled: True if torch.compile runs the model as a whole.
        function: the call of a Function that is running.
        needs_checkpoints: True if checkpoints must not run as plain calls: NOTE [ Needed checkpoints ].
    """

    def __init__(self, mark: Callable[[], int], locate: Callable[[torch.UntypedStorage], int]) -> None:
        self.locate = locate
        self.record = ForwardRecord()
        self.newest: StorageTable[int] = StorageTable()
        self.module = ROOT
        self.pins: Mapping[str, str] = {}
        self.generators = UsedGenerators()
        self.compiled = False
        self.function: FunctionCall | None = None
        self.needs_checkpoints = False
        self._readers: StorageTable[list[int]] = StorageTable()  # ops that read an external storage
        self._memory: dict[int, Memory] = {}  # of parameters as forward began, by id
        # Parameters that were read, with their storage then and its bytes, by id.
        self._read: dict[int, tuple[weakref.ref[Parameter], weakref.ref[torch.UntypedStorage], Memory]] = {}
        # By storage: the checkpoint, run as a plain call, in which autograd saved it last.
        self._saved_in: StorageTable[int] = StorageTable()
        # What checkpoints, run as plain calls, read from outside, and the address of its storage then.
        self._read_in_calls: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id
        self._compiled_depth = 0  # compiled parts that are running, nested
        self._graph_begins = False  # the next op is the first one of a compiled graph
        self._in_loss = False
        self._mark = mark
        self._has_streams = has_streams()

    def begin_forward(self, parameters: Iterable[Parameter]) -> None:
        """Note the memory that `parameters` of the model have as a forward begins."""
        self._memory = {id(p): memory_of(p) for p in parameters if type(p) is Parameter}
        self._read.clear()

    def moves(self, tensor: Tensor) -> bool:
        """Return True if `tensor` is on a parameter that got its memory in this forward; note the read."""
        parameter = parameter_of(tensor) if self._memory and has_storage(tensor) else None
        if parameter is None:
            return False
        version = self.newest.get(tensor)
        if version is not None and not self.record.ops[self.record.versions[version].op].must_save:
            return False  # made by an op that can fill it again
        memory = memory_of(parameter)
        refs = weakref.ref(parameter), weakref.ref(parameter.untyped_storage())
        self._read.setdefault(id(parameter), (*refs, memory))
        if self._memory.get(id(parameter), memory) == memory:
            return False
        moving_weights.setdefault(parameter, None)
        return True

    def _note_moved(self) -> None:
        """Have ops saved that have read a parameter whose memory is another one by now."""
        for ref, of_storage, memory in self._read.values():
            parameter, storage = ref(), of_storage()
            if parameter is not None and memory_of(parameter) != memory:
                moving_weights.setdefault(parameter, None)
                if storage is not None:
                    self.save_readers(storage, MOVES)

    def save_readers(self, storage: torch.UntypedStorage, reason: str) -> None:
        """Have the ops saved that have read `storage`, which forward did not make."""
        for reader in self._readers.of(storage) or ():
            self.record.ops[reader].force_save(reason)

    def begin(self, facts: OpFacts, args: Args, kwargs: Kwargs) -> RunningOp:
        """Record an op that is about to run. The caller sets its marks, and calls `end`."""
        index = len(self.record.ops)
        written = written_tensors(facts, args, kwargs)
        unread = (*written, *old_statistics(facts.name, args))
        tensors = list(tensors_in(args, kwargs))
        moves = sum(map(self.moves, tensors))  # notes all of them
        reads = self._reads(tensors, index, unread, unread_argument(facts, args, kwargs))
        if facts.collective:
            note_groups(facts, args, kwargs)
        draws = facts.draws(args, kwargs)
        if draws:
            self.generators.keep(generator_of(args, kwargs))
        reason = MOVES if moves else ""
        if not all(map(has_storage, tensors)):
            reason = "reads a tensor without a storage of its own"
        op = self._add_op(facts, args, kwargs, reads, reason, draws=draws)
        operands = tensor_versions((args, kwargs)) if facts.opaque else []
        return RunningOp(op, written, operands)

    def _add_op(
        self, facts: OpFacts, args: Args, kwargs: Kwargs, reads: tuple[int, ...], reason: str, *, draws: bool
    ) -> RecordedOp:
        """Record an op that reads `reads`, and that cannot run again for `reason`; "" if it can."""
        pin = self.pins.get(self.module)
        must_save = PINNED if pin == MUST_SAVE else facts.must_save
        if pin == MUST_RECOMPUTE and not facts.never_recomputed:
            must_save = ""
        op = RecordedOp(
            facts,
            self.module,
            reads,
            signature_of(facts.name, args, kwargs),
            draws,
            0,
            must_save,
            pin == MUST_RECOMPUTE,
            self._stream(),
            compiled=self._compiled_depth > 0,
            begins_graph=self._graph_begins,
        )
        self._graph_begins = False
        if self.compiled and not self._compiled_depth:
            reason = BETWEEN_GRAPHS
        elif self._in_loss:
            reason = OUTSIDE_OF_MODEL
        if reason:
            op.force_save(reason)
        self.record.ops.append(op)
        return op

    def end(self, running: RunningOp, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
        """Record what the op of `begin` has returned and written."""
        op, index, written = running.op, len(self.record.ops) - 1, running.written
        op.flops = flops_of(func, args, kwargs, out)
        if not (op.module in self.pins or op.must_save or op.random) and decides(op.facts, args, kwargs, out):
            op.must_save = DECIDES
        written += [tensor for tensor, version in running.operands if tensor._version != version]
        only_write = op.facts.in_place and len(written) == 1
        for tensor in written:
            self._new_version(tensor, index, only_write=only_write)
        for tensor in outputs_of(out):
            self._new_output(tensor, index, args, kwargs)

    def _reads(
        self,
        tensors: Iterable[Tensor],
        op: int,
        unread: Sequence[Tensor] = (),
        like: Tensor | None = None,
    ) -> tuple[int, ...]:
        """Note that `op` reads `tensors`; return their versions.

        Args:
            unread: tensors from outside of which `op` does not need the contents to run again.
            like: a tensor of which `op` reads no contents.
        """
        reads: dict[int, None] = {}
        for tensor in tensors:
            if not has_storage(tensor):
                note_mesh(tensor)
                continue
            version = self.newest.get(tensor)
            if running_call() and (version is None or isinstance(tensor, torch.nn.Parameter)):
                self._note_read_in_call(tensor)
            if version is not None:
                reads[version] = None
                self._note_crossing(version)
                if not self._compiled_depth and self.record.ops[self.record.versions[version].op].compiled:
                    self.force_save(version, ANOTHER_GRAPH)
                self.note_stream(version)
                if tensor is not like:
                    self.note_contents(version)
            elif not any(tensor is other for other in unread):
                self._note_reader(tensor, op)
        return tuple(reads)

    def note_contents(self, version: int) -> None:
        """Note that `version` is read, and have its op saved if an unseen kernel has written it since."""
        if self.record.versions[version].blank:
            self.force_save(version, UNSEEN)

    def begin_function(self, call: FunctionCall, args: Args, kwargs: Kwargs) -> RecordedOp:
        """Record a call of a Function that is about to run. The caller sets its marks."""
        tensors, index = call.arguments.tensors, len(self.record.ops)
        moves = sum(map(self.moves, tensors))  # notes all of them
        reads = self._reads(tensors, index)
        self.function = call
        return self._add_op(call.facts, args, kwargs, reads, MOVES if moves else "", draws=False)

    def end_function(self, call: FunctionCall, out: Any) -> None:
        """Record what the call of `begin_function` has returned and written."""
        index = len(self.record.ops) - 1
        for _, tensor in call.returned_slots(out):
            self._new_output(tensor, index, (), {})
        for tensor in call.written:
            if self.newest.get(tensor) is not None:
                self.record.ops[-1].force_save(WRITES_ARGUMENTS)
            self._new_version(tensor, index, only_write=False)

    def begin_inside(self, facts: OpFacts, args: Args, kwargs: Kwargs) -> None:
        """Note an op inside of a Function, which is recorded as a whole, before it runs."""
        if facts.collective:
            note_groups(facts, args, kwargs)
        if facts.draws(args, kwargs):
            self.generators.keep(generator_of(args, kwargs))
            self.record.ops[-1].random = True

    def end_inside(self, func: Any, facts: OpFacts, args: Args, kwargs: Kwargs, out: Any) -> None:
        """Note what the op of `begin_inside` has returned and written."""
        for tensor in written_tensors(facts, args, kwargs):
            self._new_version(tensor, len(self.record.ops) - 1, only_write=False)
        self.record.ops[-1].flops += flops_of(func, args, kwargs, out)

    def note_pack(self, tensor: Tensor, depth: int) -> bool:
        """Note that autograd packs `tensor`; return False if it is for a graph inside of a Function.

        Args:
            depth: as for `FunctionCall.is_forward_over`.
        """
        call = self.function
        if call is not None:
            if not call.is_forward_over(depth):
                return False
            if call.made_storage(tensor):
                self._new_output(tensor, len(self.record.ops) - 1, (), {})
        if (plain_call := running_call()) and has_storage(tensor):
            self._saved_in.set(tensor, plain_call)
        return True

    def end_forward(self, output: Any) -> list[Tensor]:
        """Mark the end of a forward that returned `output`; return its tensors that forward did not make."""
        self.record.forward_ends.append(len(self.record.ops))
        self._note_moved()
        for ref, address in self._read_in_calls.values():
            if (tensor := ref()) is not None and tensor.untyped_storage()._cdata != address:
                self._need_checkpoints()
        others = []
        for position, tensor in enumerate(chain.from_iterable(map(below, batch_tensors([output])))):
            version = self.newest.get(tensor) if has_storage(tensor) else None
            if version is None:
                others.append(tensor)
            else:
                self.record.outputs.append((position, self.record.versions[version].storage))
        return others

    def begin_loss(self) -> None:
        """Mark the end of the model: no plan covers the ops that follow."""
        self._in_loss = True

    def force_save(self, version: int, reason: str) -> None:
        """Have the op that wrote `version` saved."""
        self.record.ops[self.record.versions[version].op].force_save(reason)

    def _note_crossing(self, version: int) -> None:
        # A forward holds what it reads of an earlier one (autocast's copy of a weight) as if external.
        ends, writer = self.record.forward_ends, self.record.versions[version].op
        if ends and writer < ends[-1] and not self._in_loss:
            self.force_save(version, CROSSES_FORWARDS)

    def note_stream(self, version: int) -> None:
        """Have `version` saved if the current stream is not the one that made it."""
        if self._has_streams and self.record.ops[self.record.versions[version].op].stream != self._stream():
            self.force_save(version, CROSSES_STREAMS)

    def _stream(self) -> int:
        return private.current_stream() if self._has_streams else 0

    def enter_compiled(self, written: Sequence[Tensor]) -> None:
        """Stop recording: the ops of compiled code are in no plan, and what they write becomes external."""
        for tensor in written:
            if has_storage(tensor):
                self._note_overwrite(tensor, by=-1)
                self.newest.drop(tensor)
        self._compiled_depth += 1
        self._graph_begins = True

    def leave_compiled(self) -> None:
        """Record ops again, after `enter_compiled`."""
        self._compiled_depth -= 1
        self._graph_begins = False

    def hold(self, tensors: Iterable[Tensor], reason: str = CROSSES) -> None:
        """Have the ops that made `tensors` saved."""
        for tensor in tensors:
            if has_storage(tensor) and (version := self.newest.get(tensor)) is not None:
                self.force_save(version, reason)

    def _note_overwrite(self, tensor: Tensor, *, by: int) -> None:
        # Recompute never writes external storages, so ops that read the old contents cannot run again. A
        # region copies what little state a Function has.
        small = tensor.untyped_storage().nbytes() <= SMALL
        for reader in self._readers.get(tensor) or ():
            op = self.record.ops[reader]
            if reader != by and not (small and op.facts.function):
                op.must_save = OVERWRITTEN

    def _need_checkpoints(self) -> None:
        self.needs_checkpoints = True
        need_checkpoints()

    def _new_version(self, tensor: Tensor, op: int, *, only_write: bool) -> None:
        if not has_storage(tensor):
            return
        saved_in = self._saved_in.get(tensor)
        if saved_in not in (None, running_call()) and not self.record.ops[op].facts.statistics:
            self._need_checkpoints()
        previous = self.newest.get(tensor)
        if previous is None:
            self._note_overwrite(tensor, by=op)
            return
        if self.record.versions[previous].op == op:
            return  # two views of one storage
        recorded = self.record.ops[op]
        if previous not in recorded.reads:  # a nested operand of a higher-order op
            recorded.reads += (previous,)
        self._add_version(tensor, op, self.record.versions[previous].storage, previous)
        if only_write:
            self.record.versions[-1].window = recipe_of(tensor)

    def _new_output(self, tensor: Tensor, op: int, args: Args, kwargs: Kwargs) -> None:
        if not has_storage(tensor):
            self.record.ops[op].must_save = "its output has no storage of its own"
            return
        if self.newest.get(tensor) is not None:
            return
        storage = tensor.untyped_storage()
        if any(has_storage(t) and t.untyped_storage() is storage for t in tensors_in(args, kwargs)):
            return
        mark = self.record.ops[op].end_mark
        mark = mark if mark >= 0 else self._mark()  # a Function saves what it made before it returns
        found = RecordedStorage(self.locate(storage), mark, storage.nbytes())
        self.record.storages.append(found)
        self._add_version(tensor, op, len(self.record.storages) - 1, -1)
        self.record.versions[-1].blank = self.record.ops[op].facts.blank and tensor.numel() > 0

    def _add_version(self, tensor: Tensor, op: int, storage: int, previous: int) -> None:
        self.newest.set(tensor, len(self.record.versions))
        if previous >= 0:
            self.record.versions[previous].next = len(self.record.versions)
        self.record.versions.append(RecordedVersion(op, storage, previous))

    def _note_read_in_call(self, tensor: Tensor) -> None:
        address = tensor.untyped_storage()._cdata
        ref, before = self._read_in_calls.get(id(tensor), (None, address))
        if before == address or ref is None or ref() is not tensor:
            self._read_in_calls[id(tensor)] = weakref.ref(tensor), address
        else:  # `tensor.data = ...` runs no op
            self._need_checkpoints()

    def _note_reader(self, tensor: Tensor, op: int) -> None:
        if (readers := self._readers.get(tensor)) is None:
            self._readers.set(tensor, readers := [])
        readers.append(op)
