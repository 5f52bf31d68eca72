"""A device that is here, for a step that does not fit on it: what it can do, and how long each op takes.

`datasheet_of` measures a datasheet on the spot. `LocalTimes` runs every kind of op of a fake step once or a
few times by itself, on made-up numbers, so only one op's inputs and outputs need memory.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autoac.profiler.timing.cache import Measured, Times, machine, processor
from autoac.profiler.timing.op_timer import event_now, host_clock
from autoac.profiler.timing.roofline import Device, bytes_moved
from autoac.profiler.torch_facts.op_facts import OpFacts
from autoac.profiler.torch_facts.op_signature import signature_of
from autoac.profiler.torch_facts.private import (
    FakeTensor,
    disable_current_modes,
    tree_leaves,
    tree_map_only,
    unset_fake_temporarily,
)
from autoac.profiler.torch_facts.storage_table import has_storage_or_fake

PRODUCT = 768  # rows and columns of the products that the peak is measured with; 4096 where there is a stream
COPIED = 2**26  # bytes that are copied to measure the bandwidth
TINY_CALLS = 200

RUNS = 3  # of each kind of op, after one that warms up
LONG_S = 0.2  # an op that takes longer than this runs once
PART_OF_MEMORY = 0.5  # that one op may take

_TYPES = (torch.float32, torch.bfloat16)


def datasheet_of(device: torch.device) -> Device:
    """Measure what `device` does: products by type, bandwidth, launch. Takes about a second.

    These are rates that kernels reached, with the threads that torch has now, so nothing is taken off them.
    """
    n = PRODUCT if device.type == "cpu" else 4096
    rates = {dtype: 2 * n**3 / _product_s(n, dtype, device) for dtype in _TYPES}
    source = torch.ones(COPIED // 4, device=device)
    target = torch.empty_like(source)
    copy_s = least_s(lambda: target.copy_(source), device)
    x = torch.ones(8, device=device)

    def tiny() -> None:
        for _ in range(TINY_CALLS):
            x.neg()

    return Device(
        name=processor() if device.type == "cpu" else torch.cuda.get_device_name(device),
        flops_per_s=MappingProxyType(rates),
        other_flops_per_s=rates[torch.float32],
        bytes_per_s=2 * COPIED / copy_s,
        memory_bytes=_memory_of(device),
        launch_us=least_s(tiny, device) / TINY_CALLS * 1e6,
        flops_efficiency=1.0,
        bandwidth_efficiency=1.0,
        device_type=device.type,
        allocator_rounding=512 if device.type == "cuda" else 1,
    )


def datasheet_of_this_cpu() -> Device:
    """The datasheet of the processor that this runs on, for torch's number of threads, measured now."""
    return datasheet_of(torch.device("cpu"))


def _product_s(n: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    return least_s(lambda: a @ b, device)


def _memory_of(device: torch.device) -> int:
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.cuda.get_device_properties(device).total_memory)


def least_s(call: Callable[[], object], device: torch.device, runs: int = 5) -> float:
    """The least time of several calls after one that warms up: what the device can do, in seconds."""
    return min(seconds(call, device) for _ in range(runs + 1))


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """What one call takes: by the host's clock, elsewhere by events of the device's stream."""
    if device.type == "cpu":
        now = host_clock(device)
        began = now()
        call()
        return (now() - began) / 1e9
    began_event = event_now(device)
    call()
    ended_event = event_now(device)
    torch.get_device_module(device).synchronize(device)
    return float(began_event.elapsed_time(ended_event)) / 1e3


class LocalTimes:
    """How long ops take on a device that is here, each kind run by itself and then remembered.

    An op whose operands do not fit, or that does not run on made-up numbers, takes what the datasheet says.

    Args:
        device: where ops run.
        sheet: its datasheet.
        times: the file in which run times are kept, if any.
    """

    def __init__(self, device: torch.device, sheet: Device, times: Times | None = None) -> None:
        self.notes: dict[str, None] = {}
        self.device = device
        self.sheet = sheet
        self._times = times
        self._here = machine(device, sheet.name)
        self._known: dict[Hashable, Measured] = {}
        self._fresh: dict[Hashable, Measured] = {}

    def runtime_us(
        self, facts: OpFacts, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> float:
        """Run time of one call, in microseconds; 0 for a view. Its tensors may be fake."""
        estimate = self.sheet.runtime_us(facts, func, args, kwargs, out)
        if facts.view or facts.collective or facts.opaque:
            return estimate
        signature = signature_of(facts.name, args, kwargs)
        measured = self._known.get(signature)
        if measured is None:
            measured = self._look_up(signature) or self._measure(signature, facts, func, args, kwargs, out)
            if measured is None:
                self.notes[f"{facts.name} was not run, and its time is estimated"] = None
                measured = (estimate, 0.0, 0)
            self._known[signature] = measured
        return measured[0]

    def _look_up(self, signature: Hashable) -> Measured | None:
        return self._times.ops(self._here, [signature]).get(signature) if self._times is not None else None

    def _measure(
        self,
        signature: Hashable,
        facts: OpFacts,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
    ) -> Measured | None:
        if bytes_moved(args, kwargs, out) > self.sheet.memory_bytes * PART_OF_MEMORY:
            return None
        if not all(has_storage_or_fake(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)):
            return None
        with unset_fake_temporarily(), disable_current_modes(), torch.no_grad():
            try:
                taken = [self._once(func, args, kwargs)]  # warms up
                runs = 1 if taken[0] > LONG_S else RUNS
                taken = [self._once(func, args, kwargs) for _ in range(runs)]
            except (RuntimeError, IndexError, ValueError, NotImplementedError):
                return None  # out of memory, or it wants other numbers: the caller notes it
        middle = statistics.median(taken)
        spread = statistics.median(abs(s - middle) for s in taken)
        measured = (round(middle * 1e6, 3), round(spread * 1e6, 3), runs)
        self._fresh[signature] = measured
        return measured

    def _once(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        """Made anew each time, since an op may write its operands."""
        real_args, real_kwargs = tree_map_only(Tensor, self._made_up, (tuple(args), dict(kwargs)))
        if isinstance(real_kwargs.get("device"), torch.device):
            real_kwargs["device"] = self.device
        return seconds(lambda: func(*real_args, **real_kwargs), self.device)

    def _made_up(self, tensor: Tensor) -> Tensor:
        """A tensor as `tensor` on the device: its values if they are known, else ones, or zeros to index."""
        if type(tensor) is not FakeTensor and not tensor.is_meta:
            return tensor.detach().to(self.device, copy=True)
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self.device)
        return made.fill_(1 if tensor.is_floating_point() or tensor.is_complex() else 0)

    def keep(self) -> None:
        """Write down what was measured, if there is a file."""
        if self._times is not None:
            self._times.keep_ops(self._here, self._fresh)
        self._fresh = {}

    @property
    def kinds(self) -> int:
        """How many kinds of op have a measured time."""
        return sum(samples > 0 for _, _, samples in self._known.values())
