"""A fake step: a training step on tensors without memory, for a device that is not here.

Forward and backward run under FakeTensorMode, so each op computes the shapes of its outputs and nothing else.
A hollow step (hollow.py) reads memory from the allocator's record and times from a clock. A fake step reads
memory from the births and deaths of the fake tensors' storages, and times from the roofline of a datasheet
(timing/roofline.py). Everything after that is shared, so both kinds of step give the same kind of Profile.

NOTE [ Known values ]

Models look: at whether a mask is all ones, at the largest position. Floating-point tensors are fake, but
integer and bool tensors of the batch, of buffers and out of nothing (`arange`) are real, and what comes
from such alone is computed for real, so a model finds in it what it would find in training and takes the
same path. transformers, for one, builds the T x T attention masks that it would do without when what
tells it that no sequence is packed is a FakeTensor; with known values it is none. What comes from a fake
tensor (the choice of a router) is fake: looking at it raises CannotFake.

NOTE [ One device ]

The fake tensors say that they are on the CPU, whatever the datasheet says: torch has an autograd engine
for devices that its build knows, and a planner should give the same profile on every build. Where the
same call runs other ops on a GPU, gpu_dispatch.py sends it there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoac.planner.units import rounded_bytes
from autoac.profiler.capture.allocations import Block, Change
from autoac.profiler.capture.op_recorder import Recorder
from autoac.profiler.capture.saved_tensor_recorder import SavedTensorRecorder
from autoac.profiler.distributed.ddp import without_ddp_sync
from autoac.profiler.errors import CannotFake
from autoac.profiler.restore.module_state import modules_restored
from autoac.profiler.steps.gpu_dispatch import gpu_paths
from autoac.profiler.steps.hollow import HollowStep, isolated_call, take_step
from autoac.profiler.steps.training_loop import ONE_FORWARD, Loop, Loss
from autoac.profiler.timing.on_device import LocalTimes
from autoac.profiler.timing.op_timer import middle_and_spread
from autoac.profiler.timing.roofline import Device
from autoac.profiler.torch_facts import private
from autoac.profiler.torch_facts.gradients import gradient_of
from autoac.profiler.torch_facts.op_facts import OpFacts, facts_of, written_tensors
from autoac.profiler.torch_facts.op_signature import outputs_of, tensors_in
from autoac.profiler.torch_facts.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    TorchDispatchMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from autoac.profiler.torch_facts.rng import generators_restored
from autoac.profiler.torch_facts.storage_table import StorageTable
from autoac.profiler.torch_facts.storage_table import has_storage_or_fake as has_storage

CPU = torch.device("cpu")  # see NOTE [ One device ]

KNOWN_NBYTES = 2**30
"""Integer tensors that an op makes from nothing are known up to this size, in bytes."""


# What autograd writes into a fresh or unshared gradient, and for tensor subclasses into a new tensor:
# `can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp, and `index_backward` and
# `value_selecting_reduction_backward` in torch/csrc/autograd/FunctionsManual.cpp.
_IN_PLACE_FOR_REAL = {
    torch.ops.aten.add.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.scatter.src,
}


class FakeAllocations(TorchDispatchMode):
    """A record of allocations (allocations.py) of tensors that have no memory.

    A storage comes when the op that returns it does, and goes when torch lets go of it. What a kernel
    allocates inside itself is not seen.
    """

    def __init__(self, device: Device, runtime_us: Callable[..., float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runtime_us = runtime_us
        self.changes: list[Change] = []
        self.places: list[int] = []
        self.times_ns: list[int] = []
        self.notes: dict[str, None] = {}  # what went otherwise than it would for real
        self.idle: Callable[[], bool] = bool  # whether what runs now is ours, and takes no time
        self._device = device
        self._now_us = 0.0
        self._blocks: list[Block] = []  # by address, which counts from 1
        self._open: StorageTable[Block] = StorageTable()
        self._known: StorageTable[bool] = StorageTable()  # floating-point tensors made from known ones
        self._sum: tuple[Block | None, Block | None] = (None, None)  # see _settle
        self._deaths: set[weakref.ref[torch.UntypedStorage]] = set()

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def mark(self) -> int:
        """Place a mark; returns its number, counted from 0."""
        self._settle()
        self.places.append(len(self.changes))
        self.times_ns.append(round(self._now_us * 1e3))
        return len(self.places) - 1

    def locate(self, storage: torch.UntypedStorage) -> int:
        """The address of a storage that came inside the record; 0 for any other."""
        block = self._open.of(storage)
        return block.address if block is not None else 0

    def block_at(self, address: int, mark: int) -> Block | None:
        """The block at `address`: no address is given out twice."""
        return self._blocks[address - 1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        facts = facts_of(func)
        if func is torch.ops.prim.device.default:  # asked at every turn
            return func(*args, **kwargs)
        out = self._run(facts, func, args, kwargs)
        if not facts.view:
            self._settle()
            for tensor in outputs_of(out):
                self._note_output(tensor, args, kwargs)
            if func in _IN_PLACE_FOR_REAL and private.current_graph_task_id() >= 0:
                self._sum = (self._block_added_to(args[0]), self._block_of(out))
            if not self.idle():
                self._now_us += self._runtime_us(facts, func, args, kwargs, out)
        return out

    def _run(self, facts: OpFacts, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op for real where all that it reads is known, else on fake tensors."""
        inputs = list(tensors_in(args, kwargs))
        if not all(map(self._is_known, inputs)):
            try:
                out = func(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise CannotFake(facts.name, "it depends on values that are not known") from error
            except UnsupportedOperatorException as error:
                raise CannotFake(facts.name, "torch has no fake kernel of it") from error
            if any(map(_is_real, written_tensors(facts, args, kwargs))):
                self.notes[f"{facts.name} wrote over values that the model may look at"] = None
                return args[0] if facts.in_place else out  # not the fake that torch made in its place
            return out
        if inputs:
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
            for tensor in outputs_of(out):
                if not _decides(tensor) and has_storage(tensor):
                    self._known.set(tensor, True)
            return out
        out = func(*args, **kwargs)
        if all(_decides(t) and t.nbytes <= KNOWN_NBYTES for t in outputs_of(out)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return out

    def _is_known(self, tensor: Tensor) -> bool:
        return _is_real(tensor) and (_decides(tensor) or self._known.get(tensor) is not None)

    def _block_of(self, tensor: Any) -> Block | None:
        if not isinstance(tensor, Tensor) or not has_storage(tensor):
            return None
        return self._open.get(tensor)

    def _block_added_to(self, gradient: Any) -> Block | None:
        """The block that autograd would add to in place, unless something else holds it; see `_settle`."""
        if isinstance(gradient, Tensor) and not gradient._is_view():  # a view's base holds its storage too
            return self._block_of(gradient)
        return None

    def _settle(self) -> None:
        """Let a sum of gradients take the place of the one that it was added to, if that one is gone.

        Where gradients meet, autograd adds to the first of them in place if nothing else holds it, but to
        a tensor subclass never, and a fake tensor is one. What dies at once was held by nothing else.
        """
        old, total = self._sum
        self._sum = (None, None)
        if old is None or total is None or old.freed is None or old.freed < total.allocated:
            return
        begin, end = total.allocated, old.freed
        self.changes.insert(end, self.changes.pop(begin))
        for place in range(begin, end + 1):
            change = self.changes[place]
            if change.nbytes > 0:
                change.block.allocated = place
            else:
                change.block.freed = place

    def _note_output(self, tensor: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if not has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        if self._open.of(storage) is not None or not storage.nbytes():
            return
        if any(has_storage(t) and t.untyped_storage() is storage for t in tensors_in(args, kwargs)):
            return
        rounding = self._device.allocator_rounding
        nbytes = rounded_bytes(storage.nbytes(), rounding)
        block = Block(len(self._blocks) + 1, nbytes, len(self.changes))
        self._blocks.append(block)
        self.changes.append(Change(block, nbytes))
        self._open.put(storage, block)

        def died(death: weakref.ref[torch.UntypedStorage]) -> None:
            self._deaths.discard(death)
            block.freed = len(self.changes)
            self.changes.append(Change(block, -nbytes))

        self._deaths.add(weakref.ref(storage, died))

    def close(self) -> None:
        """Note no more deaths: what is still there outlives the record."""
        self._deaths.clear()


def _decides(tensor: Tensor) -> bool:
    """Whether it is an integer or a bool tensor: such index and decide."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _is_real(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.device.type == "cpu"


def _unknown(tensor: Tensor) -> Tensor:
    """A fake tensor of the same size, strides and type."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=CPU)


def _known_or_not(tensor: Tensor) -> Tensor:
    """A copy of what is known, and a fake tensor for the rest. Leaves the tensor as it is."""
    if _is_real(tensor) and _decides(tensor):
        with unset_fake_temporarily():
            return tensor.clone()
    return _unknown(tensor)


@contextlib.contextmanager
def _autocast_of(device: Device) -> Iterator[list[str]]:
    """The caller's autocast for `device`, in force for the device that the fake tensors are on."""
    if device.device_type == "cpu" or not torch.is_autocast_enabled(device.device_type):
        yield []
        return
    with torch.autocast("cpu", dtype=torch.get_autocast_dtype(device.device_type)):
        yield ["autocast: ops were cast by the CPU's lists, which differ a little from the GPU's"]


def run(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Loss | None,
    device: Device,
    accumulates: bool | None = None,
    local: LocalTimes | None = None,
    loop: Loop = ONE_FORWARD,
) -> tuple[HollowStep, list[str]]:
    """Run one fake step; nothing of the model's size is allocated.

    The model and the batch may be real, on the meta device, or fake. Run times are `local`'s, which runs
    each kind of op by itself, or else those of the datasheet.

    Returns:
        What the step left behind, and notes on what was estimated.

    Raises:
        NothingToProfile: no output of the model depends on anything that requires a gradient.
        CannotFake: an op needs values that are not known, or a kernel that torch has no fake of.
    """
    if accumulates is None:
        accumulates = any(gradient_of(parameter) is not None for parameter in model.parameters())
    allocations = FakeAllocations(device, (local or device).runtime_us)
    recorder = Recorder(allocations.mark, allocations.locate, has_storage)
    saved = SavedTensorRecorder(recorder, allocations.mark)
    allocations.idle = lambda: recorder.paused
    paths = gpu_paths() if device.device_type != "cpu" else contextlib.nullcontext()
    with (
        generators_restored(CPU if local is None else local.device),
        modules_restored(model),
        without_ddp_sync(model),
        paths,
        _autocast_of(device) as notes,
        FakeTensorMode(allow_non_fake_inputs=True),
        isolated_call(
            model, args, kwargs, _unknown, _known_or_not, _known_or_not, accumulates=accumulates
        ) as (
            call,
            leaves,
        ),
    ):
        try:
            with allocations, torch.enable_grad():
                marks = take_step(model, call, leaves, loss, recorder, saved, allocations.mark, CPU, loop)
        finally:
            saved.closed = True
            allocations.close()
            for state in recorder.generators.values():
                state.restore()
    at = allocations.times_ns
    ops = recorder.record.ops
    times = [(at[op.ended] - at[op.began]) / 1e3 for op in ops]
    estimated = middle_and_spread(times, [op.signature for op in ops], {})
    step = HollowStep(recorder.record, saved, allocations, estimated, at, *marks)
    return step, [*notes, *allocations.notes, *(local.notes if local is not None else ())]
