"""Record a training step while a region of `ac_client` runs it.

An *observed* step holds little: its backward recomputes. So its record differs in three ways from that of a
step that saves everything, and all three are undone here:

1. What the region copies, compares or recomputes takes memory that no plan needs. It is allocated between two
   marks, which are `hidden`.
2. A storage that the region holds is not freed when forward lets go of it (held_storages.py).
3. A tensor that backward unpacks may stay cached for a later node. Without a region it would be free when the
   function of its node returns, which the trace of autograd's nodes shows.

A *fake* step has no such trace. Its region saves everything, and backward gets new memory in place of each
tensor (`replaced`), so that the record shows when the node frees it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autoac.planner.formats.profile import CROSSES, OVERWRITTEN, UNSEEN
from autoac.tape.capture.allocations import AllocatedBlock, allocated_between
from autoac.tape.capture.fake_allocations import Allocations
from autoac.tape.capture.op_recorder import (
    OUTSIDE_OF_MODEL,
    RESIZED,
    TEMPORARY,
    OpRecorder,
    RecordedOp,
    RecordedStorage,
)
from autoac.tape.capture.op_timer import OpSpans
from autoac.tape.capture.saved_tensor_recorder import SavedEvent, SavedTensorRecorder
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.module_paths import ROOT
from autoac.tape.torch_facts.op_facts import OpFacts, facts_of
from autoac.tape.torch_facts.op_signature import Args, Kwargs
from autoac.tape.torch_facts.storage_table import has_storage
from autoac.tape.unseen.function_calls import FunctionCall
from autoac.tape.unseen.held_storages import HeldStorages
from autoac.tape.unseen.moving_weights import is_refilled, parameter_of


def _never_called(*_: Any) -> None:
    """Stand in for what runs outside of the model."""


OUTSIDE = OpFacts(name="outside", name_in_keys="outside", call=_never_called)
OUTSIDE_SIGNATURE = ("outside of the model",)
STAND_IN = "_autoac_call"
"""Attribute of the empty tensors that an interpreted graph saves: its call, which has what backward reads."""
SMALL_NBYTES = 1024  # what allocates no larger blocks, such as a sum, needs no op of its own


class StepTape:
    """Record the ops that a region runs, what autograd saves, and what backward asks for.

    Args:
        allocations: the record of the step.
        replays: measures the run times of replays.

    Attributes:
        recorder: of the ops.
        saved: of the saved tensors.
        hidden: pairs of marks; what is allocated in between belongs to the region.
        temporary: storages that only the region holds longer than until the mark.
        inside: True while an op runs that is recorded already.
        replays: as passed.
        wrappers: paths of modules whose own ops are in no plan, such as DDP's.
        unit_of: returns the FSDP unit of a module, if the model is sharded.
        kept_units: units that keep a tensor which others read, such as a loss in an attribute.
        region: that runs the forward, for its compiled graphs.
        replaced: in a fake step, returns new memory of the form of a saved tensor.
        small_buffers: addresses of small storages of the model, which its loop may write before backward.
        copied: tensors on those that the region has copied, with their version counters.
    """

    def __init__(self, allocations: Allocations, replays: OpSpans) -> None:
        mark = allocations.mark
        self.recorder = OpRecorder(mark, allocations.locate)
        self.saved = SavedTensorRecorder(self.recorder, mark)
        self.hidden: list[tuple[int, int]] = []
        self.temporary: list[RecordedStorage] = []
        self.inside = False
        self.replays = replays
        self.wrappers: Set[str] = frozenset()
        self.unit_of: Callable[[str], Any] | None = None
        self.kept_units: list[Any] = []
        self.region: Any = None
        self.replaced: Callable[[Tensor], Tensor] | None = None
        self.small_buffers: Set[int] = frozenset()
        self.copied: list[tuple[Tensor, int]] = []
        self._mark = mark
        self._op: RecordedOp | None = None  # whose kernel has not run yet
        self._outside = -1  # mark at which the model's last forward ended
        self._began = -1  # mark at which the region began with a Function
        self._packing = -1  # mark at which it began to pack
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by id: equal if of one storage
        self._signatures: dict[int, Hashable] = {}  # by order of the node
        self._node: tuple[int, int] | None = None  # of a backward inside of forward, that has unpacked
        self._unpacks: list[SavedEvent] = []  # of that node
        self.held = HeldStorages(self._storage_of, self._let_go, self._was_temporary)

    def _storage_of(self, tensor: Tensor) -> int | None:
        version = self.recorder.newest.get(tensor)
        if version is None:
            return None
        storage = self.recorder.record.versions[version].storage
        # A backward inside of forward may have got other memory, with the same contents.
        address = self.recorder.locate(tensor.untyped_storage())
        return storage if address == self.recorder.record.storages[storage].address else None

    def _let_go(self, storage: int) -> None:
        found = self.recorder.record.storages[storage]
        if found.let_go < 0 and not self.saved.closed:
            found.let_go, found.let_go_before = self._mark(), len(self.recorder.record.ops)

    def _was_temporary(self, tensor: Tensor) -> None:
        if not self.saved.closed and self.recorder.newest.get(tensor) is None:
            address = self.recorder.locate(tensor.untyped_storage())
            self.temporary.append(RecordedStorage(address, self._mark()))
            if tensor.untyped_storage().nbytes() >= SMALL_NBYTES:
                self.recorder.save_readers(tensor.untyped_storage(), TEMPORARY)

    @contextmanager
    def hiding(self) -> Iterator[None]:
        """Leave out what is allocated inside."""
        begin = self._mark()
        yield
        self.hidden.append((begin, self._mark()))

    # --- forward ------------------------------------------------------------------------------------------

    def run(
        self,
        dispatch: Callable[..., Any],
        func: Any,
        facts: OpFacts,
        args: Any,
        kwargs: Any,
        must_save: str = "",
    ) -> Any:
        """Run an op by `dispatch`, which calls its kernel by `call`, and record it.

        Args:
            must_save: why it must not run again; "" if it may.
        """
        recorder = self.recorder
        if recorder.function is not None:
            recorder.begin_inside(facts, args, kwargs)
            out = self._inside(dispatch, func, args, kwargs)
            recorder.end_inside(func, facts, args, kwargs, out)
            return out
        if recorder.module in self.wrappers:
            return self._inside(dispatch, func, args, kwargs)
        return self._record(dispatch, func, facts, args, kwargs, must_save)

    def run_compiled(self, func: Any, args: Any, kwargs: Any, must_save: str) -> Any:
        """Run an op of a compiled graph that is interpreted, and record it.

        Args:
            must_save: why it must not run again; "" if it may.
        """
        return self._record(self.region.run_compiled, func, facts_of(func), args, kwargs, must_save)

    def _record(
        self, dispatch: Callable[..., Any], func: Any, facts: OpFacts, args: Any, kwargs: Any, must_save: str
    ) -> Any:
        recorder = self.recorder
        self.held.look()
        begin = self._mark()
        running = recorder.begin(facts, args, kwargs)
        op = self._op = running.op
        if must_save:
            op.force_save(must_save)
        self._note_node_runs()
        out = self._inside(dispatch, func, args, kwargs)
        recorder.end(running, func, args, kwargs, out)
        self.hidden += [(begin, op.begin_mark), (op.end_mark, self._mark())]
        return out

    def _inside(self, dispatch: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        self.inside = True
        try:
            return dispatch(func, (), args, kwargs)
        finally:
            self.inside = False

    def crossing(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield those of `tensors` that an op of another FSDP unit than the running one has made."""
        recorder, unit_of = self.recorder, self.unit_of
        assert unit_of is not None
        for tensor in tensors:
            version = recorder.newest.get(tensor) if has_storage(tensor) else None
            if version is not None:
                writer = recorder.record.ops[recorder.record.versions[version].op]
                unit = unit_of(writer.module)
                if unit is not unit_of(recorder.module):
                    if unit is not None and writer.must_save != CROSSES and unit not in self.kept_units:
                        self.kept_units.append(unit)
                    yield tensor

    @property
    def must_save(self) -> bool:
        """Return True if the op that is about to run must not run again."""
        if self._op is None:
            return self.recorder.module in self.wrappers
        return bool(self._op.must_save)

    def call(self, kernel: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Call the kernel of the op that runs, between two marks."""
        op, self._op = self._op, None
        if op is None:
            return kernel(*args, **kwargs)
        op.begin_mark = self._mark()
        try:
            return kernel(*args, **kwargs)
        finally:
            op.end_mark = self._mark()

    def begin_function(self, call: FunctionCall, args: Args, kwargs: Kwargs) -> None:
        """Record a call of a Function, whose `run` is then called by `call`."""
        self.held.look()
        self._began = self._mark()
        call.hiding = self.hiding
        self._op = self.recorder.begin_function(call, args, kwargs)
        self._note_node_runs()

    def end_function(self, call: FunctionCall, out: Any, *, raised: bool) -> None:
        """Record what the call of `begin_function` has returned and written. The region examines it next."""
        recorder = self.recorder
        recorder.function = self._op = None
        op = recorder.record.ops[-1]
        self.hidden.append((self._began, op.begin_mark))
        if not raised:
            recorder.end_function(call, out)

    def function_examined(self, call: FunctionCall, order: int | None) -> None:
        """Note the end of all that the region does around a call of a Function.

        Args:
            order: of its node; None if the call is saved.
        """
        if order is not None:
            self.note_node(order)
        op = self.recorder.record.ops[-1]
        self.hidden.append((op.end_mark, self._mark()))
        if call.reason:
            op.force_save(call.reason)

    def note_resize(self, tensor: Tensor) -> None:
        """Note that the model is about to change the size of the storage of `tensor`."""
        version = self.recorder.newest.get(tensor)
        if version is not None:
            self.note_unseen_write(tensor, RESIZED)
            self.saved.leave_to_model(self.recorder.record.versions[version].storage)
            self.recorder.newest.drop(tensor)

    def note_unseen_write(self, tensor: Tensor, reason: str = UNSEEN) -> None:
        """Note that a kernel which no mode sees has written the storage of `tensor`."""
        version = self.recorder.newest.get(tensor)
        if version is not None:
            self.recorder.force_save(version, reason)
            for op in self.recorder.record.ops:
                if version in op.reads:
                    op.force_save(OVERWRITTEN)

    def note_node(self, order: int) -> None:
        """Note the order of the node that the region has made for the latest op."""
        self._signatures[order] = self.recorder.record.ops[-1].signature

    def pack(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor that autograd saves; None if forward did not make it.

        Views of weights that backward fills again count as made elsewhere.

        RegionHooks.pack calls this, which autograd called. Then it calls `packed`.
        """
        self._packing = self._mark()
        sees = self.saved.sees(tensor, 4)
        if has_storage(tensor) and (parameter := parameter_of(tensor)) is not None:
            self.held.look()  # what filled it
            if self.recorder.moves(tensor) and (parameter is tensor or is_refilled(parameter)):
                return None
        return self.saved.add_tensor(tensor) if sees else None

    def packed(self) -> None:
        """Note that the region has packed the tensor."""
        self.hidden.append((self._packing, self._mark()))

    def begin_loss(self) -> None:
        """Note that the model has run, and that its loss follows, whose ops belong to no module."""
        self.wrappers = frozenset()
        self.recorder.begin_loss()

    def begin_outside(self) -> None:
        """Note that what follows, until backward, runs outside of the model."""
        self.held.look()
        self._outside = self._mark()

    def end_outside(self, allocations: Allocations, backward: int) -> list[AllocatedBlock]:
        """Record what ran outside of the model as one op, if it took memory; return the blocks that it made.

        Args:
            allocations: the whole record.
            backward: mark at which backward begins.
        """
        hidden = {
            id(block)
            for begin, end in self.hidden
            if begin >= self._outside
            for block in allocated_between(allocations, begin, end)
        }
        between = allocated_between(allocations, self._outside, backward)
        made = [block for block in between if id(block) not in hidden]
        if any(block.nbytes >= SMALL_NBYTES for block in made):
            op = RecordedOp(OUTSIDE, ROOT, (), OUTSIDE_SIGNATURE, False, 0, OUTSIDE_OF_MODEL)
            op.begin_mark, op.end_mark = self._outside, backward
            self.recorder.record.ops.append(op)
        return made

    # --- backward -----------------------------------------------------------------------------------------

    def note_replay(self, order: int, began: Any) -> None:
        """Note that the node with this order has run again, since `replays.begin` returned `began`."""
        if (signature := self._signatures.get(order)) is not None:
            self.replays.end(signature, began)

    def unpack_compiled(
        self, saved: int, unpack: Callable[[], Tensor], node: str
    ) -> tuple[Tensor, SavedEvent | None]:
        """Return the saved tensor of this number for a node of a compiled graph, until `end_node`."""
        if self.saved.closed:
            return unpack(), None
        self.held.look()
        event = self.saved.begin_unpack(saved, node)
        tensor, event.kept = unpack(), False
        event.end_mark = self._mark()
        self.hidden.append((event.mark, event.end_mark))
        return self.saved.note_unpack_in_forward(tensor, saved), event

    def end_node(self, events: Iterable[SavedEvent]) -> None:
        """Note that a node of a compiled graph has freed what it got by `unpack_compiled`."""
        for event in events:
            event.freed_mark = self._mark()

    def unpack(self, saved: int, unpack: Callable[[], tuple[Tensor, bool]]) -> Tensor:
        """Return the saved tensor of this number, and record that backward asked for it.

        Args:
            unpack: returns the tensor, and True if the region goes on holding it.
        """
        if self.saved.closed or saved in self.saved.elsewhere:
            return unpack()[0]
        self.held.look()
        event = self.saved.begin_unpack(saved)
        tensor, event.kept = unpack()
        if self.replaced is not None:
            tensor, event.kept = self.replaced(tensor), False
        event.end_mark = self._mark()
        self.hidden.append((event.mark, event.end_mark))

        def freed(ref: weakref.ref[torch.UntypedStorage]) -> None:
            del self._refs[id(ref)]
            if not self.saved.closed:
                event.freed_mark = self._mark()

        ref = weakref.ref(tensor.untyped_storage(), freed)
        self._refs[id(ref)] = ref
        if not self.saved.forward_over:
            self._note_node_runs()
            self._node = running_node()
            self._unpacks.append(event)
            event.needed_until = len(self.recorder.record.ops)
            if self.recorder.newest.get(tensor) is None:  # it was recomputed
                self.recorder.newest.set(tensor, self.saved.versions[saved])
        return tensor

    def _note_node_runs(self) -> None:
        """Note that what the node of a backward inside of forward has unpacked is needed so far."""
        if self._unpacks and self._node != running_node():
            self._unpacks.clear()
        for event in self._unpacks:
            event.needed_until = len(self.recorder.record.ops)


def running_node() -> tuple[int, int] | None:
    """Return what tells the running node of autograd from others: its graph task, and its number."""
    node = private.current_autograd_node()
    return None if node is None else (private.current_graph_task_id(), node._sequence_nr())
