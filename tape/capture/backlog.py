"""Queue work on a GPU ahead of what is timed, so that no time of the host is measured.

The device notes the time of an event when it reaches it. An idle device reaches an event as soon as the host
records it, so two events around an op give the time that the host takes to launch the op. If other work is
queued ahead, the host records both events before the device reaches the first, and the time between them is
the device's own:

    host     sleep begin op end
    device   [ sleep ...........][begin][ op ][end]

`_sleep` of torch.cuda spins for a number of cycles and touches no memory, so caches stay as they were. An op
that waits for the device itself, such as `nonzero`, drains the queue: host and device then take turns, as
they do in training.

What must stay true: nothing is subtracted from a measured time. A time that the host may have lengthened
counts only if the kind of op has no other times. `Backlog.note` gives the number of such times.
"""

from __future__ import annotations

import functools

import torch

from autoac.tape.torch_facts import private

FIRST_US = 50.0  # of work queued ahead; doubled each time the device runs out of it
LONGEST_US = 400.0  # more than the host takes to launch an op; for ops that wait, none is enough
CALIBRATION_CYCLES = 1 << 20


class Backlog:
    """Keeps a device busy with queued work, so that the host's time between ops is not measured.

    Attributes:
        can_queue: False if torch cannot queue such work on the device. Then `queue` does nothing.
        timed, late: how many times `was_ahead` was called, and how often the answer was False.
    """

    def __init__(self, device: torch.device, longest_us: float = LONGEST_US) -> None:
        self._device = device
        self._cycles_per_us = cycles_per_us(device)
        self._us = FIRST_US
        self._longest_us = longest_us
        self.can_queue = self._cycles_per_us > 0
        self.timed = self.late = 0

    def queue(self) -> None:
        """Queue work. Record the first event right after this call."""
        if self.can_queue:
            _sleep(self._device, round(self._us * self._cycles_per_us))

    def was_ahead(self, begin: torch.Event) -> bool:
        """Return True if the host was ahead of the device from event `begin` until now.

        Call it once the last event is recorded. If the device has already reached `begin`, more work is
        queued from now on.
        """
        self.timed += 1
        if self.can_queue and not begin.query():
            return True
        self.late += 1
        self._us = min(2 * self._us, self._longest_us)
        return False

    @property
    def is_longest(self) -> bool:
        """Return True if no more work can be queued ahead."""
        return not self.can_queue or self._us >= self._longest_us

    def note(self) -> str:
        """Return a sentence on times that may include time of the host; "" if none does."""
        if not self.late:
            return ""
        if not self.can_queue:
            return "run times include time of the host: torch cannot queue work ahead on this device"
        return f"{self.late} of {self.timed} timed intervals may include time of the host"


def record_event(device: torch.device) -> torch.Event:
    """Record an event in the stream that ops on `device` use now: in backward, that of the running node.

    Without a stream, the event would go to the *current* device, which need not be the model's.
    """
    event = torch.Event(device=device, enable_timing=True)
    event.record(torch.get_device_module(device).current_stream(device))
    return event


@functools.cache
def cycles_per_us(device: torch.device) -> float:
    """Return how many cycles of `_sleep` take a microsecond on `device`; 0 if it cannot sleep."""
    if private.sleep_of(device) is None:
        return 0.0
    _sleep(device, CALIBRATION_CYCLES)  # loads the kernel
    begin = record_event(device)
    _sleep(device, CALIBRATION_CYCLES)
    end = record_event(device)
    torch.get_device_module(device).synchronize(device)
    slept_ms = float(begin.elapsed_time(end))
    return CALIBRATION_CYCLES / (slept_ms * 1e3) if slept_ms > 0 else 0.0


def _sleep(device: torch.device, cycles: int) -> None:
    sleep = private.sleep_of(device)
    assert sleep is not None
    with torch.get_device_module(device).device(device):
        sleep(cycles)
