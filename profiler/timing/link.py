"""Measure the link between a device and its host, with both directions busy."""

from __future__ import annotations

import functools

import torch

from autoac.planner.formats.profile import LinkRates
from autoac.profiler.timing.roofline import COPY_US, Device
from autoac.tape.capture.op_timer import host_clock

MOST_COPIED, LEAST_COPIED = 1 << 24, 1 << 18  # bytes
COPIES = 64  # in each direction


def link_of(device: torch.device | Device) -> LinkRates | None:
    """Return the rates of a device's link to the host: measured once in a process, or from the datasheet.

    A measurement copies in both directions at once, and takes 32 MiB of the host and of the device, or less
    where the device has no room. The latency is assumed (`COPY_US`). None for a device that computes in the
    memory of the host, or whose datasheet has no link.

    Raises:
        torch.OutOfMemoryError: the device has not even room for half a MiB.
        RuntimeError: the host pins no memory.
    """
    if isinstance(device, Device):
        rate = device.link_bytes_per_s / 1e6
        return LinkRates(out_bytes_per_us=rate, in_bytes_per_us=rate, latency_us=COPY_US) if rate else None
    return None if device.type == "cpu" else _measured(device)


@functools.cache
def _measured(device: torch.device) -> LinkRates:
    on_device = _two_on(device)
    nbytes = on_device[0].nbytes
    on_host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    out, into = torch.Stream(device), torch.Stream(device)
    took_ns = [0, 0]
    now = host_clock(device)
    for copies in (1, COPIES):
        torch.accelerator.synchronize(device)
        begin = now()
        for _ in range(copies):
            with out:
                on_host[0].copy_(on_device[0], non_blocking=True)
            with into:
                on_device[1].copy_(on_host[1], non_blocking=True)
        for i, stream in enumerate((out, into)):
            stream.synchronize()
            took_ns[i] = now() - begin
    out_rate, in_rate = (1e3 * COPIES * nbytes / ns for ns in took_ns)
    return LinkRates(out_bytes_per_us=out_rate, in_bytes_per_us=in_rate, latency_us=COPY_US)


def _two_on(device: torch.device) -> list[torch.Tensor]:
    """Return two tensors on a device, as large as it has room for."""
    nbytes = MOST_COPIED
    while True:
        try:
            return [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        except torch.OutOfMemoryError:
            if nbytes <= LEAST_COPIED:
                raise
            nbytes //= 4
