"""Measure the peak of steps of a planned model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import Policy
from autoac.profiler import device_of
from autoac.tape.distributed.fsdp import parameters_of
from autoac.tape.distributed.wrapped_tensors import with_memory
from autoac.tape.torch_facts.gradients import gradient_of


class MeasuredSteps:
    """Measure steps of a planned model by the record of the allocator.

    Attributes:
        timeline: that is being recorded; None if none is.
        peak_bytes: the peak of the last measured block; None if there was none.
        policy: under which the last step of that block ran.
        beyond_plan: a step of the block ran on a batch that its plan does not cover.
    """

    def __init__(self) -> None:
        self.timeline: AllocatorTimeline | None = None
        self.peak_bytes: int | None = None
        self.policy: Policy | None = None
        self.beyond_plan = False
        self._counted: Set[int] = frozenset()  # storages that are part of the block's base
        self._batches: dict[
            int, weakref.ref[Any]
        ] = {}  # by storage, of batches that may be older than the block

    @contextmanager
    def record(self, model: nn.Module, state: Iterable[Tensor], base: int) -> Iterator[AllocatorTimeline]:
        """Record the body; the timeline is complete when the with-block ends.

        Args:
            model: the model whose steps run.
            state: of its optimizers.
            base: bytes live at the beginning, batches not included; see `AllocatorTimeline`.

        Raises:
            RuntimeError: torch.profiler is running.
        """
        timeline = AllocatorTimeline(device_of(model), base=base)
        self.beyond_plan = False
        try:
            with timeline:
                self.timeline = timeline
                own = [*parameters_of(model), *model.buffers()]
                self._counted = {storage._cdata for storage in _storages(own)}
                watches = _watch(chain(own, map(gradient_of, own), state), timeline)
                del own  # the steps may replace them
                yield timeline
                del watches
        finally:
            self.timeline = None
            self._batches.clear()
        self.peak_bytes = timeline.peak_bytes

    def note_batch(self, batch: Iterable[Tensor]) -> None:
        """Note that a step of the block runs on `batch`.

        A batch that was made before the block is in no record: neither its allocation nor its release.
        """
        timeline = self.timeline
        if timeline is None:
            return
        for storage in _storages(batch):
            key, nbytes, address = storage._cdata, storage.nbytes(), storage.data_ptr()
            if not nbytes or key in self._counted or key in self._batches:
                continue
            timeline.note_existing(storage)

            def note_release(_: object, key: int = key, nbytes: int = nbytes, address: int = address) -> None:
                self._batches.pop(key, None)
                timeline.note_release(nbytes, address)

            self._batches[key] = weakref.ref(storage, note_release)


def _watch(tensors: Iterable[Any], timeline: AllocatorTimeline) -> list[weakref.ref[Any]]:
    """Note in `timeline` when memory of `tensors`, part of its base, is released, while the result lives.

    `zero_grad` releases gradients, and `parameter.data = ...` what the parameter had.
    """
    storages = {storage._cdata: storage for storage in _storages(tensors)}

    def watch(storage: torch.UntypedStorage) -> weakref.ref[Any]:
        nbytes = storage.nbytes()
        return weakref.ref(storage, lambda _: timeline.note_release(nbytes))

    return [watch(storage) for storage in storages.values()]


def _storages(tensors: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    return (tensor.untyped_storage() for tensor in with_memory(tensors))
