"""How long each op takes on the device.

Times come from the profiled step itself and from further forwards, which keep nothing (`OpTimer`). One
forward runs each kind of op once per block, so a few of them are many samples of most kinds.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from autoac.profiler.restore.batch import Call
from autoac.profiler.restore.written_tensors import Originals
from autoac.profiler.torch_facts.op_facts import facts_of
from autoac.profiler.torch_facts.op_signature import signature_of
from autoac.profiler.torch_facts.private import TorchDispatchMode
from autoac.profiler.torch_facts.rng import GeneratorState, capture_generator, generator_of
from autoac.profiler.torch_facts.storage_table import has_storage

SAMPLES = 5  # of each kind of op that more forwards are run for, and the most of these forwards
LEAST_SAMPLES = 3  # of them, that do without those of the profiled step
MOST_STEPS = 1.75  # that a profile may take, in steps, more forwards included, or
CLOCK_READ_EVERY = 8  # stops of the clock
EXTRA_S = 0.1  # that more forwards may take, in seconds, where steps are short
RARE = 0.1  # part of forward's time that may be in kinds of op with fewer samples than that

Samples = dict[Hashable, list[float]]
"""Run times in microseconds, by signature."""


def host_clock(device: torch.device) -> Callable[[], int]:
    """The clock of the host for a step on `device`, in nanoseconds.

    On the CPU with one thread it is that thread's own time, which runs only while it does: others on the
    machine then do not count. With several, what this one does is not all, and it is the time of day; so it
    is for other devices, whose backward torch runs on threads of their own.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time_ns if alone else time.perf_counter_ns


BETWEEN = ("between ops",)
"""Stands for a signature: the time from the end of one op to the beginning of the next (`OpTimer`)."""


class Clock(Protocol):
    """Tells when places in a step were come to; it is stopped at each of them."""

    def stop(self) -> None: ...

    def go_on(self) -> None: ...

    def times_ns(self) -> list[int]: ...


class HostClock:
    """The host's clock, which stands still from `stop` to `go_on`, while something else is done.

    Reading a thread's clock is a system call, which can take longer than an op. So how long it stood still is
    read for one stop in `CLOCK_READ_EVERY`, and taken to be the median of these for all.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._stopped_ns: list[int] = []
        self._lost_ns: list[int] = []  # while it stood still, where that was read

    def stop(self) -> None:
        self._stopped_ns.append(self._now_ns())

    def go_on(self) -> None:
        if len(self._stopped_ns) % CLOCK_READ_EVERY == 1:
            self._lost_ns.append(self._now_ns() - self._stopped_ns[-1])

    def times_ns(self) -> list[int]:
        """When it was stopped, each time."""
        lost = round(statistics.median(self._lost_ns)) if self._lost_ns else 0
        times = (stopped - i * lost for i, stopped in enumerate(self._stopped_ns))
        return list(itertools.accumulate(times, max))  # a stop that was shorter moves no time back


class DeviceClock:
    """Events in the device's stream: when the device came to each place, not when the host did.

    A device that waits for the host goes on counting.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.Event] = []

    def stop(self) -> None:
        self._events.append(event_now(self._device))

    def go_on(self) -> None:
        pass

    def times_ns(self) -> list[int]:
        """When the device came to each place, from the first one on. Waits for the device."""
        torch.get_device_module(self._device).synchronize(self._device)
        # Of two neighbours, so that a float of milliseconds has microseconds in it.
        steps_ms = (a.elapsed_time(b) for a, b in itertools.pairwise(self._events))
        return [round(ms * 1e6) for ms in itertools.accumulate(steps_ms, initial=0.0)][: len(self._events)]


def event_now(device: torch.device) -> torch.Event:
    """An event in the stream that ops on `device` go to now: in backward, that of the op whose backward runs.

    Without a stream it would be one of the *current* device, which need not be the model's.
    """
    event = torch.Event(device=device, enable_timing=True)
    event.record(torch.get_device_module(device).current_stream(device))
    return event


def clock_of(device: torch.device) -> Clock:
    """What times the ops of a step on `device`."""
    return HostClock(host_clock(device)) if device.type == "cpu" else DeviceClock(device)


class OpTimer(TorchDispatchMode):
    """Times the ops of a forward: by the clock on the CPU, elsewhere by events of the device's stream.

    And what is between them: Python, the dispatcher, memory given back, a device that waits for its host. An
    op that runs again takes that once more.

    `generators` are the explicit ones that the forward drew from, as they were.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device, originals: Originals) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._originals = originals
        self.generators: dict[int, GeneratorState] = {}
        self._device = device
        self._host_now = host_clock(device)
        self._spans: list[tuple[Hashable, Any, Any]] = []  # signature, begin, end

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        facts = facts_of(func)
        if facts.view:
            return func(*args, **kwargs)
        if facts.draws(args, kwargs):
            generator = generator_of(args, kwargs)
            if id(generator) not in self.generators:
                self.generators[id(generator)] = capture_generator(generator)
        signature = signature_of(facts.name, args, kwargs)
        self._originals.keep(facts, args, kwargs)
        began = self._now()
        out = func(*args, **kwargs)
        self._spans.append((signature, began, self._now()))
        self._originals.note(args, kwargs, out)
        return out

    def _now(self) -> Any:
        return self._host_now() if self._device.type == "cpu" else event_now(self._device)

    def samples(self) -> Samples:
        """What was timed. On a device with a stream this waits for it."""
        on_cpu = self._device.type == "cpu"
        if not on_cpu and self._spans:
            torch.get_device_module(self._device).synchronize(self._device)

        def us(began: Any, ended: Any) -> float:
            return float((ended - began) / 1e3 if on_cpu else began.elapsed_time(ended) * 1e3)

        found: Samples = {}
        for signature, began, ended in self._spans:
            found.setdefault(signature, []).append(us(began, ended))
        for (_, _, ended), (_, began, _) in itertools.pairwise(self._spans):
            found.setdefault(BETWEEN, []).append(us(ended, began))
        return found


def timed_forward(call: Call, device: torch.device) -> Samples:
    """Run forward as in training, but so that autograd keeps nothing of it.

    Explicit generators that it draws from are afterwards as before; torch's own are the caller's affair.
    """
    timer = OpTimer(device, call.originals)
    try:
        with torch.autograd.graph.saved_tensors_hooks(_described, _ones), torch.enable_grad(), timer:
            call()
    finally:
        torch.clear_autocast_cache()
        for state in timer.generators.values():
            state.restore()
    return timer.samples()


def forwards(
    call: Call,
    device: torch.device,
    wanted: Mapping[Hashable, float],
    forward_s: float,
    left_s: float,
) -> Samples:
    """Run forward again and again, until the kinds of op in `wanted` have been seen often enough.

    Those that together take a small part of the time need not be (`RARE`).

    Args:
        call: runs forward.
        device: where.
        wanted: kinds of op, and what all calls of each took.
        forward_s: what one forward takes, in seconds.
        left_s: what all may take, in seconds.
    """
    samples: Samples = {}
    now_ns = host_clock(device)
    spent, last = 0.0, forward_s
    for _ in range(SAMPLES):
        lacking = sum(took for key, took in wanted.items() if len(samples.get(key, ())) < SAMPLES)
        if spent + last > left_s or (samples and lacking <= RARE * sum(wanted.values())):
            break
        began = now_ns()
        found = timed_forward(call, device)
        for key in wanted.keys() & found.keys():
            samples.setdefault(key, []).extend(found[key])
        last = (now_ns() - began) / 1e9
        spent += last
    return samples


def _described(tensor: Tensor) -> Any:
    if not has_storage(tensor):  # sparse, nested: they have no strides
        return tensor.detach()
    return tensor.size(), tensor.stride(), tensor.dtype, tensor.device


def _ones(packed: Any) -> Tensor:
    """For a model that differentiates inside its forward."""
    if isinstance(packed, Tensor):
        return packed
    size, stride, dtype, device = packed
    return torch.empty_strided(size, stride, dtype=dtype, device=device).fill_(1)


def middle_and_spread(
    in_step_us: Sequence[float], signatures: Sequence[Hashable], more: Mapping[Hashable, Sequence[float]]
) -> dict[Hashable, tuple[float, float, int]]:
    """Median, median absolute deviation and number of samples, by kind of op.

    Where `more` has enough samples, those taken in the profiled step are left out: the record of
    allocations makes each op a little slower.
    """
    samples: Samples = {BETWEEN: []} if more.get(BETWEEN) else {}
    for runtime, signature in zip(in_step_us, signatures, strict=True):
        samples.setdefault(signature, []).append(runtime)
    found: dict[Hashable, tuple[float, float, int]] = {}
    for signature, own in samples.items():
        others = list(more.get(signature, ()))
        taken = others if len(others) >= LEAST_SAMPLES else own + others
        middle = statistics.median(taken)
        spread = statistics.median(abs(value - middle) for value in taken)
        found[signature] = (round(middle, 3), round(spread, 3), len(taken))
    return found
