"""Copy storages to the host and back, each direction on a stream of its own.

NOTE [ Order of copies ]

    copy out   waits for what compute has queued, and for all copies in, since one of these may still read the
               same memory of the host, for another stream of compute
    free       compute waits for the copy out before anything can be written where the storage was
    copy in    waits for what compute has queued, since its memory may have been used before, and for the
               copy out of the same storage
    use        compute waits for the copy in

The stream of compute is looked up at each of these points, before another stream is entered and becomes the
current one. Nothing calls `record_stream`, which would make bytes depend on timing. On a CPU, a copy is over
when its call returns.

Source: races that others published: Megatron-LM#7398, TRL#7195, torchtitan#2581, torchtune#1867, TRL#5700.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autoac.tape.runtime.moves.host_memory import HostChunk, host_memory
from autoac.tape.runtime.write_guard import StaleError, detached_alias, version_counter
from autoac.tape.torch_facts import private


class Departure:
    """A storage that is copied to the host. The device holds it until `finish`.

    Args:
        tensor: on the storage; its version counter shows writes.
        name: of the op that made it.
        free: position of the op before which the plan frees it.
    """

    def __init__(self, tensor: Tensor, name: str, free: int) -> None:
        self._tensor = detached_alias(tensor)  # `tensor` may get a history, which must not be held
        self._counter = version_counter(self._tensor)
        self.storage, self.free = tensor.untyped_storage(), free
        chunk, copied = _copy_out(self.storage)
        self.copy = HostCopy(chunk, copied, self.storage.device, name)
        self._wait = _Wait(copied, self.storage.device)

    def finish(self) -> None:
        """Have compute wait for the copy, and let go of the storage."""
        if version_counter(self._tensor) != self._counter:
            self.copy.written = True
        self._wait.now()
        del self._tensor, self.storage

    def __del__(self) -> None:
        if hasattr(self, "storage"):  # the region never ended
            self._wait.now()


class HostCopy:
    """A storage on the host.

    Attributes:
        written: the storage was written while it was copied.
    """

    def __init__(self, chunk: HostChunk, copied: torch.Event | None, device: torch.device, name: str) -> None:
        self._chunk, self._copied, self._device, self._name = chunk, copied, device, name
        self.written = False

    def fetch(self) -> tuple[torch.UntypedStorage, Callable[[], None]]:
        """Allocate memory of the device, queue the copy into it, and return it with a function to wait.

        The function makes compute wait until the copy is over.

        Raises:
            StaleError: the storage was written while it was copied to the host.
        """
        if self.written:
            raise StaleError(
                f"an output of {self._name} was written in place while it was copied to the host, by code "
                "that the plan does not know. Keep it on the device: "
                'ac_client.pin(module, "must_save") before ac_client.apply'
            )
        device, chunk = self._device, self._chunk
        unseen = private.DisableTorchDispatch()
        target = torch.empty(chunk.data.numel(), dtype=torch.uint8, device=device)
        if device.type == "cpu":
            target.copy_(chunk.data)
            arrived = None
        else:
            compute = torch.accelerator.current_stream(device)
            into = _streams(device)[1]
            into.wait_event(compute.record_event())
            if self._copied is not None:
                into.wait_event(self._copied)
            with into:
                target.copy_(chunk.data, non_blocking=True)
            arrived = into.record_event()
        del unseen
        return target.untyped_storage(), _Wait(arrived, device).now


class _Wait:
    """Has compute wait for a copy, at the latest when this object dies and the memory may be reused."""

    def __init__(self, event: torch.Event | None, device: torch.device) -> None:
        self._event, self._device = event, device
        self._stream = None if event is None else torch.accelerator.current_stream(device)

    def now(self) -> None:
        """Have the stream of compute, and the current one, wait."""
        event, self._event = self._event, None
        if event is None:
            return
        assert self._stream is not None
        stalls.wait(self._stream, event)
        current = torch.accelerator.current_stream(self._device)
        if current != self._stream:
            current.wait_event(event)

    def __del__(self) -> None:
        self.now()


class Stalls:
    """Times how long compute waits for copies, while it watches: by two events around each wait."""

    def __init__(self) -> None:
        self._waits: list[tuple[torch.Event, torch.Event]] | None = None

    def watch(self) -> None:
        """Time the waits from now on."""
        self._waits = []

    def take(self) -> float:
        """Stop, let the device finish the waits, and return their total time in microseconds."""
        waits, self._waits = self._waits or [], None
        for _, end in waits:
            end.synchronize()
        return 1e3 * sum(begin.elapsed_time(end) for begin, end in waits)

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Have `stream` wait for `event`."""
        waits = self._waits
        if waits is None:
            stream.wait_event(event)
            return
        begin, end = (torch.Event(stream.device, enable_timing=True) for _ in range(2))
        stream.record_event(begin)
        stream.wait_event(event)
        stream.record_event(end)
        waits.append((begin, end))


stalls = Stalls()


def _copy_out(storage: torch.UntypedStorage) -> tuple[HostChunk, torch.Event | None]:
    device = storage.device
    chunk = host_memory.allocate(storage.nbytes(), device)
    unseen = private.DisableTorchDispatch()
    source = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    if device.type == "cpu":
        chunk.data.copy_(source)
        copied = None
    else:
        compute = torch.accelerator.current_stream(device)
        out, into = _streams(device)
        out.wait_event(compute.record_event())
        out.wait_stream(into)
        with out:
            chunk.data.copy_(source, non_blocking=True)
        copied = out.record_event()
    del unseen
    return chunk, copied


_made: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}


def _streams(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    """Return the streams of copies out of `device` and into it."""
    if device not in _made:
        _made[device] = torch.Stream(device), torch.Stream(device)
    return _made[device]
