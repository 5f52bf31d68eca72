"""Measure a device that is here, for a step that does not fit on it: its datasheet, and its time for each op.

`datasheet_of` measures a datasheet. `OpTimesOnDevice` runs each kind of op of a fake step by itself a few
times, on made-up numbers, so only the inputs and outputs of one op need memory.

On a GPU, work is queued ahead of each timed call (backlog.py). A call that is timed by itself would find its
operands in the L2 cache, since they were just made. In a step they are in the cache only by chance. So the
cache is overwritten before each call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autoac.profiler.timing.cache import Times, machine, processor
from autoac.profiler.timing.roofline import Device, KernelKind, bytes_moved, workspace_of
from autoac.tape.capture.backlog import Backlog, record_event
from autoac.tape.capture.op_timer import OpTime, host_clock, median_and_deviation
from autoac.tape.torch_facts.libraries import cudnn_of
from autoac.tape.torch_facts.op_facts import OpFacts
from autoac.tape.torch_facts.op_signature import signature_of
from autoac.tape.torch_facts.private import (
    FakeTensor,
    disable_current_modes,
    tree_leaves,
    tree_map_only,
    unset_fake_temporarily,
)
from autoac.tape.torch_facts.storage_table import has_storage

Call = Callable[[], object]

PRODUCT_ROWS = 768  # rows and columns of the products that measure the peak on the CPU
PRODUCT_ROWS_ON_GPU = 4096
COPIED_NBYTES = 2**26  # copied to measure the bandwidth
COPIED_NBYTES_ON_GPU = 2**29  # several times the largest cache
TINY_CALLS = 200  # of an op on few elements, to measure the launch

RUNS = 3  # of each kind of op, after one that warms up
LONG_S = 0.2  # an op that takes longer than this runs once
LONGEST_BACKLOG_US = 50_000.0  # the host takes less to launch `TINY_CALLS` ops
CACHE_SIZES = 4  # memory that is written to replace what the L2 cache holds, in sizes of that cache
CACHE_BEHIND_L2_ON_ROCM = 2**28  # bytes; the largest Infinity Cache, which properties do not report
PART_OF_MEMORY = 0.5  # that the tensors of one op may take

_TYPES = (torch.float32, torch.bfloat16)


def datasheet_of(device: torch.device) -> Device:
    """Measure the datasheet of `device`: products by type, bandwidth, launch. Takes about a second.

    The rates are those that kernels reached, with torch's present number of threads, so the efficiencies
    are 1.
    """
    n = PRODUCT_ROWS if device.type == "cpu" else PRODUCT_ROWS_ON_GPU
    rates = {dtype: 2 * n**3 / _product_s(n, dtype, device) for dtype in _TYPES}
    copied = COPIED_NBYTES if device.type == "cpu" else COPIED_NBYTES_ON_GPU
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    copy_s = least_s(lambda: target.copy_(source), device)
    x = torch.ones(8, device=device)
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    capability = torch.cuda.get_device_capability(device) if is_nvidia else None

    def tiny() -> None:
        for _ in range(TINY_CALLS):
            x.neg()

    return Device(
        name=processor() if device.type == "cpu" else torch.cuda.get_device_name(device),
        flops_per_s=MappingProxyType(rates),
        other_flops_per_s=rates[torch.float32],
        bytes_per_s=2 * copied / copy_s,
        memory_bytes=_memory_of(device),
        launch_us=least_s(tiny, device) / TINY_CALLS * 1e6,
        efficiency=MappingProxyType(dict.fromkeys(KernelKind, 1.0)),
        device_type=device.type,
        allocator_rounding=512 if device.type == "cuda" else 1,
        capability=capability,
        cudnn=cudnn_of(device),
        workspace_nbytes=workspace_of(capability) if capability is not None else 0,
    )


def _product_s(n: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    return least_s(lambda: a @ b, device)


def _memory_of(device: torch.device) -> int:
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.cuda.get_device_properties(device).total_memory)


def least_s(call: Call, device: torch.device, before: Call = lambda: None) -> float:
    """Return the shortest time of several calls, in seconds. The first call warms up.

    Args:
        before: runs before each call and is not timed.
    """
    return min(seconds(call, device, before) for _ in range(6))


def seconds(call: Call, device: torch.device, before: Call = lambda: None) -> float:
    """Return the time of one call: by the host's clock on the CPU, by events of the stream elsewhere.

    On a GPU, work is queued ahead of the call. If the device runs out of work before the host has launched
    the whole call, the call runs again with more work queued ahead, as long as more can be queued.

    Args:
        call: what is timed.
        device: where it runs.
        before: runs before each call and is not timed.
    """
    if device.type == "cpu":
        before()
        now = host_clock(device)
        begin = now()
        call()
        return (now() - begin) / 1e9
    backlog = Backlog(device, LONGEST_BACKLOG_US)
    while True:
        before()
        backlog.queue()
        begin_event = record_event(device)
        call()
        end_event = record_event(device)
        done = backlog.is_longest
        done = backlog.was_ahead(begin_event) or done
        torch.get_device_module(device).synchronize(device)
        if done:
            return float(begin_event.elapsed_time(end_event)) / 1e3


def cache_overwriter(device: torch.device, cpu_nbytes: int = 0) -> Call:
    """Return a function that replaces what the caches of `device` hold; on the CPU it writes `cpu_nbytes`."""
    if device.type == "cpu":
        return torch.empty(cpu_nbytes, dtype=torch.uint8).zero_ if cpu_nbytes else lambda: None
    cache_nbytes = torch.get_device_module(device).get_device_properties(device).L2_cache_size
    if torch.version.hip is not None:
        cache_nbytes += CACHE_BEHIND_L2_ON_ROCM
    return torch.empty(CACHE_SIZES * cache_nbytes, dtype=torch.uint8, device=device).zero_


# Would crash the process by themselves: torch's fake of oneDNN's LSTM has a workspace of no bytes, and its
# backward reads it.
_CRASHES_ALONE = {"aten.mkldnn_rnn_layer_backward.default"}


class OpTimesOnDevice:
    """Run times of ops on a device that is here. Each kind is measured once, by itself.

    An op whose operands do not fit, or that fails on made-up numbers, takes the time that the datasheet
    gives.

    Args:
        device: where ops run.
        datasheet: of `device`.
        times: the cache of run times, if any.

    Attributes:
        notes: ops that were not measured.
    """

    def __init__(self, device: torch.device, datasheet: Device, times: Times | None = None) -> None:
        self.notes: dict[str, None] = {}
        self.device = device
        self.datasheet = datasheet
        self._times = times
        self._overwrite_caches = cache_overwriter(device)
        self._machine = machine(device, datasheet.name)
        self._known: dict[Hashable, OpTime] = {}
        self._new: dict[Hashable, OpTime] = {}  # measured here, not in the cache so far

    def runtime_us(
        self, facts: OpFacts, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> float:
        """Return the run time of one call in microseconds, 0 for a view. Its tensors may be fake."""
        estimate = self.datasheet.runtime_us(facts, func, args, kwargs, out)
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

    def _look_up(self, signature: Hashable) -> OpTime | None:
        return self._times.ops(self._machine, [signature]).get(signature) if self._times is not None else None

    def _measure(
        self,
        signature: Hashable,
        facts: OpFacts,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
    ) -> OpTime | None:
        is_too_large = bytes_moved(args, kwargs, out) > self.datasheet.memory_bytes * PART_OF_MEMORY
        if is_too_large or facts.name in _CRASHES_ALONE:
            return None
        if not all(has_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)):
            return None
        with unset_fake_temporarily(), disable_current_modes(), torch.no_grad():
            try:
                taken = [self._once(func, args, kwargs)]  # warms up
                runs = 1 if taken[0] > LONG_S else RUNS
                taken = [self._once(func, args, kwargs) for _ in range(runs)]
            except (RuntimeError, IndexError, ValueError, NotImplementedError):
                return None  # out of memory, or the op needs other numbers
        median, spread = median_and_deviation(taken)
        measured = (round(median * 1e6, 3), round(spread * 1e6, 3), runs)
        self._new[signature] = measured
        return measured

    def _once(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        """Return the time of one call, on new operands, since an op may write them."""
        real_args, real_kwargs = tree_map_only(Tensor, self._real_operand, (tuple(args), dict(kwargs)))
        if isinstance(real_kwargs.get("device"), torch.device):
            real_kwargs["device"] = self.device
        return seconds(lambda: func(*real_args, **real_kwargs), self.device, self._overwrite_caches)

    def _real_operand(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor` on the device; of a fake one, ones, or zeros if it may be an index."""
        if type(tensor) is not FakeTensor and not tensor.is_meta:
            return tensor.detach().to(self.device, copy=True)
        real = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self.device)
        return real.fill_(1 if tensor.is_floating_point() or tensor.is_complex() else 0)

    def keep(self) -> None:
        """Add what was measured to the cache, if there is one."""
        if self._times is not None:
            self._times.keep_ops(self._machine, self._new)
        self._new = {}

    @property
    def kinds(self) -> int:
        """Return how many kinds of op have a measured time."""
        return sum(samples > 0 for _, _, samples in self._known.values())
