"""Record the storages of tensors that have no memory, in place of an allocator's record."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autoac.planner.units import rounded_bytes
from autoac.tape.capture.allocations import AllocatedBlock, AllocationRecord, Change
from autoac.tape.capture.known_values import KnownValues, is_integral, is_real
from autoac.tape.capture.op_recorder import RecordedStorage
from autoac.tape.errors import CannotFake
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.op_facts import OpFacts, facts_of
from autoac.tape.torch_facts.op_signature import Args, Kwargs, outputs_of, tensors_in
from autoac.tape.torch_facts.private import FakeTensorMode
from autoac.tape.torch_facts.storage_table import StorageTable, has_storage, watching_resizes
from autoac.tape.torch_facts.view_recipes import make_view, recipe_of

# Autograd writes these sums into a new or unshared gradient, but for tensor subclasses into a new tensor:
# `can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp, and `index_backward` and
# `value_selecting_reduction_backward` in torch/csrc/autograd/FunctionsManual.cpp.
_IN_PLACE_FOR_REAL = {torch.ops.aten.add.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.scatter.src}


class FakeAllocations(KnownValues):
    """Record the storages of fake tensors as the blocks of an allocator (allocations.py).

    A storage is allocated when the op that returns it has run, and freed when torch drops it. Memory that a
    kernel allocates inside itself is not seen.

    Args:
        fakes: the mode under which the step runs.
        rounding: sizes of blocks are multiples of this.
        runtime_us: returns the run time of one call.
        kernels: return the outputs of ops, in place of torch's own fake kernels.

    """

    def __init__(
        self,
        fakes: FakeTensorMode,
        rounding: int,
        runtime_us: Callable[..., float],
        kernels: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        super().__init__(kernels)
        self.changes: list[Change] = []
        self.positions: list[int] = []
        self.times_ns: list[int] = []
        self.functions: list[tuple[int, int]] = []  # not known
        self._fakes = fakes
        self._rounding = rounding
        self._runtime_us = runtime_us
        self._now_us = 0.0
        self._open = False
        self._blocks: list[AllocatedBlock] = []  # by address, which counts from 1
        self._block_of_storage: StorageTable[AllocatedBlock] = StorageTable()
        self._gradient_sum: tuple[AllocatedBlock | None, AllocatedBlock | None] = (None, None)  # see _settle
        self._with_memories: Any = private.WeakIdKeyDictionary()  # by tensor on meta

    def new_memory(self, tensor: Tensor) -> Tensor:
        """Return a tensor like `tensor` on memory outside of the record, with values that are known."""
        hidden = private.DisableTorchDispatch()  # in force until it is deleted
        if is_real(tensor) and is_integral(tensor):
            return make_view(tensor.untyped_storage().clone(), recipe_of(tensor))
        form = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        memory: Tensor = private.FakeTensor(self._fakes, form, torch.device("cpu"))
        del hidden
        memory = private.neg_view(memory) if tensor.is_neg() else memory
        return memory.conj() if tensor.is_conj() else memory

    def mark(self) -> int:
        """Place a mark and return its number, counted from 0."""
        self._settle()
        self.positions.append(len(self.changes))
        self.times_ns.append(round(self._now_us * 1e3))
        return len(self.positions) - 1

    def backward_runs(self, begins: bool) -> None:
        """Do nothing: a fake backward is like any other code."""

    def locate(self, storage: torch.UntypedStorage) -> int:
        """Return the address of a storage that was allocated inside the record; 0 for any other."""
        block = self._block_of_storage.of(storage)
        return block.address if block is not None else 0

    def block_at(self, address: int, mark: int) -> AllocatedBlock | None:
        """Return the block at `address`. No address is used twice."""
        return self._blocks[address - 1] if address else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented or func is torch.ops.prim.device.default:  # called very often
            return out
        facts = facts_of(func)
        if not facts.view:
            self._settle()
            for tensor in outputs_of(out):
                self._note_output(tensor, args, kwargs)
            if func in _IN_PLACE_FOR_REAL and private.current_graph_task_id() >= 0:
                self._gradient_sum = (self._unshared_block_of(args[0]), self._block_of(out))
            self._now_us += self._runtime_us(facts, func, args, kwargs, out)
        return out

    def _run(self, facts: OpFacts, func: Any, args: Args, kwargs: Kwargs) -> Any:
        on_meta = list(filter(_has_no_values, tensors_in(args, kwargs)))
        if not on_meta:
            return super()._run(facts, func, args, kwargs)
        args, kwargs = private.tree_map_only(
            Tensor, partial(self._with_memory, facts.name), (args, dict(kwargs))
        )
        out = super()._run(facts, func, args, kwargs)
        written = {id(self._with_memories[tensor]): tensor for tensor in on_meta}  # in place, or as `out`
        return written.get(id(out), out)

    def _with_memory(self, op: str, tensor: Tensor) -> Tensor:
        """Return a fake tensor for one on meta that the step did not copy, such as one in a closure."""
        if not _has_no_values(tensor):
            return tensor
        if tensor.requires_grad:
            raise CannotFake(
                op,
                "outside of the model's forward it reads a tensor on meta that trains; read it there, "
                "as a parameter of the model",
            )
        found: Tensor | None = self._with_memories.get(tensor)
        if found is None:
            self._with_memories[tensor] = found = self.new_memory(tensor)
        return found

    def _block_of(self, tensor: Any) -> AllocatedBlock | None:
        if not isinstance(tensor, Tensor) or not has_storage(tensor):
            return None
        return self._block_of_storage.get(tensor)

    def _unshared_block_of(self, gradient: Any) -> AllocatedBlock | None:
        """Return the block to which autograd would add in place if no one else held it; see `_settle`."""
        if isinstance(gradient, Tensor) and not gradient._is_view():  # a view's base holds its storage too
            return self._block_of(gradient)
        return None

    def _settle(self) -> None:
        """Let a sum of gradients take the memory of its first gradient, if that gradient is freed at once.

        Where gradients meet, autograd adds to the first gradient in place if nothing else holds it, but never
        to a tensor subclass such as a fake tensor. A gradient that is freed at once was held by nothing else.
        """
        old, total = self._gradient_sum
        self._gradient_sum = (None, None)
        if old is None or total is None or old.freed_at is None or old.freed_at < total.allocated_at:
            return
        begin, end = total.allocated_at, old.freed_at
        self.changes.insert(end, self.changes.pop(begin))
        for position in range(begin, end + 1):
            change = self.changes[position]
            if change.nbytes > 0:
                change.block.allocated_at = position
            else:
                change.block.freed_at = position

    def _note_output(self, tensor: Tensor, args: Args, kwargs: Kwargs) -> None:
        if not has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        if self._block_of_storage.of(storage) is not None or not storage.nbytes():
            return
        if any(has_storage(t) and t.untyped_storage() is storage for t in tensors_in(args, kwargs)):
            return
        self._allocate(storage)

    def _allocate(self, storage: torch.UntypedStorage) -> None:
        nbytes = rounded_bytes(storage.nbytes(), self._rounding)
        block = AllocatedBlock(len(self._blocks) + 1, nbytes, len(self.changes))
        self._blocks.append(block)
        self.changes.append(Change(block, nbytes))
        self._block_of_storage.put(storage, block)
        weakref.finalize(storage, self._free, block).atexit = False

    def _free(self, block: AllocatedBlock) -> None:
        if block.freed_at is None and self._open:  # else it outlives the record
            block.freed_at = len(self.changes)
            self.changes.append(Change(block, -block.nbytes))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Note a new size: FSDP frees gathered parameters by making their storages empty."""
        block = self._block_of_storage.of(storage)
        if block is not None:
            self._free(block)
            if storage.nbytes():
                self._allocate(storage)

    def __enter__(self) -> FakeAllocations:
        self._open = True
        self._resizes = watching_resizes(after=self._resized)
        self._resizes.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._open = False
        self._resizes.__exit__(None, None, None)
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the record if it is open."""
        if self._open:
            self.__exit__(None, None, None)

    def read(self) -> None:
        """Return: the record is kept in the form in which it is read."""

    def check_complete(self, _where: str, _storages: Iterable[RecordedStorage]) -> None:
        """Return: all storages are seen."""


def _has_no_values(tensor: Tensor) -> bool:
    # In this order: to ask a fake tensor for its device runs an op.
    return not isinstance(tensor, private.FakeTensor) and tensor.is_meta


Allocations = AllocationRecord | FakeAllocations
"""The record of the allocations of a real or of a fake step: of a with-block.

`close` ends it early, or where `read` follows later, which takes a while.
"""
