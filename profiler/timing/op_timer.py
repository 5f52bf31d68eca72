"""Measure how long each kind of op takes on the device.

Times come from the profiled step itself and from further forwards, which save nothing (`OpTimer`). A forward
runs each kind of op once per block, so a few forwards give many samples of most kinds.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from autoac.profiler.restore.isolated_call import Call
from autoac.profiler.restore.written_tensors import Originals
from autoac.profiler.timing.backlog import Backlog, record_event
from autoac.profiler.timing.cache import OpTime
from autoac.profiler.torch_facts.inductor import keep_dynamo_out
from autoac.profiler.torch_facts.op_facts import facts_of
from autoac.profiler.torch_facts.op_signature import signature_of
from autoac.profiler.torch_facts.private import TorchDispatchMode
from autoac.profiler.torch_facts.rng import UsedGenerators
from autoac.profiler.torch_facts.storage_table import has_storage
from autoac.profiler.unseen.function_calls import Apply, facts_of_function, watch_functions

SAMPLES = 5  # enough for one kind of op; also the most further forwards
LEAST_SAMPLES = 3  # of further forwards, with which those of the profiled step are not used
MOST_STEPS = 1.75  # time that a profile may take, in steps, further forwards included; or
EXTRA_S = 0.1  # time that further forwards may take, in seconds, if steps are short
CLOCK_READ_EVERY = 8  # stops of the clock
RARE = 0.1  # part of forward's time that may be in kinds of op with too few samples

Samples = dict[Hashable, list[float]]
"""Run times in microseconds, by signature."""

BETWEEN_OPS = ("between ops",)
"""A pseudo-signature: the time from the end of one op to the beginning of the next (`OpTimer`).

Only on devices without a backlog: with one, the host's time between ops is not the device's.
"""


def host_clock(device: torch.device) -> Callable[[], int]:
    """Return the host's clock for a step on `device`, in nanoseconds.

    On a CPU with one thread, the clock is the CPU time of that thread, which other processes do not affect.
    Otherwise it is the time of day, since the CPU time of one thread would leave out the other threads. On
    other devices than a CPU, torch runs backward on such a thread.
    """
    single_thread = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time_ns if single_thread else time.perf_counter_ns


class Clock(Protocol):
    """Measure when each mark of a step is reached. The clock is stopped while a mark is placed."""

    def stop(self) -> None: ...

    def resume(self) -> None: ...

    def times_ns(self) -> list[int]: ...


class HostClock:
    """The host's clock, which stands still from `stop` to `resume`.

    Reading a thread's clock is a system call, which can take longer than an op. So only one stop in
    `CLOCK_READ_EVERY` is measured, and every stop is taken to be as long as the median of the measured ones.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._stopped_ns: list[int] = []
        self._lost_ns: list[int] = []  # duration of each measured stop

    def stop(self) -> None:
        self._stopped_ns.append(self._now_ns())

    def resume(self) -> None:
        if len(self._stopped_ns) % CLOCK_READ_EVERY == 1:
            self._lost_ns.append(self._now_ns() - self._stopped_ns[-1])

    def times_ns(self) -> list[int]:
        """Return the time of each `stop` in ns, without the time that reading the clock took."""
        lost = round(statistics.median(self._lost_ns)) if self._lost_ns else 0
        times = (stopped - i * lost for i, stopped in enumerate(self._stopped_ns))
        return list(itertools.accumulate(times, max))  # never backward


class DeviceClock:
    """Events in the device's stream: when the device, not the host, reached each mark.

    Between `stop` and `resume`, the clock stands still, and work is queued ahead if there is a backlog
    (backlog.py). If the device still runs out of work, the time in which it waits for the host counts.
    """

    def __init__(self, device: torch.device, backlog: Backlog | None = None) -> None:
        self._device = device
        self._backlog = backlog
        self._stops: list[torch.Event] = []
        self._starts: list[torch.Event] = []  # after each stop

    def stop(self) -> None:
        self._stops.append(record_event(self._device))
        if self._starts and self._backlog is not None:
            self._backlog.was_ahead(self._starts[-1])

    def resume(self) -> None:
        if self._backlog is not None:
            self._backlog.queue()
        self._starts.append(record_event(self._device))

    def times_ns(self) -> list[int]:
        """Wait for the device, and return the time of each stop, relative to the first."""
        torch.get_device_module(self._device).synchronize(self._device)
        # Between neighbors, so that a float of milliseconds can resolve microseconds. Where the two are in
        # different streams, the second may be earlier.
        steps_ms = (
            begin.elapsed_time(end) for begin, end in zip(self._starts, self._stops[1:], strict=False)
        )
        times_ms = itertools.accumulate(itertools.accumulate(steps_ms, initial=0.0), max)
        return [round(ms * 1e6) for ms in times_ms][: len(self._stops)]


def clock_of(device: torch.device, backlog: Backlog | None = None) -> Clock:
    """Return the clock that times the ops of a step on `device`."""
    return HostClock(host_clock(device)) if device.type == "cpu" else DeviceClock(device, backlog)


class OpSpans:
    """Measure the run times of ops: by the clock on the CPU, by events of the device's stream elsewhere.

    Work is queued ahead of each op (backlog.py).

    Args:
        device: that runs the ops.
        backlog: of the device.
        sparing: work is queued only where the device has caught up with its host. So a step takes about as
            long as its host does, and more kinds of op have late times alone.
    """

    def __init__(self, device: torch.device, backlog: Backlog, *, sparing: bool = False) -> None:
        self._on_cpu = device.type == "cpu"
        self._device = device
        self._backlog = backlog
        self._sparing = sparing
        self._host_now = host_clock(device)
        self._spans: list[tuple[Hashable, Any, Any]] = []  # signature, begin, end
        self._late: set[int] = set()  # spans that may include time of the host

    def begin(self) -> Any:
        """Return when an op begins, for `end`."""
        if self._on_cpu:
            return self._host_now()
        latest = len(self._spans) - 1
        if not self._sparing or latest < 0 or latest in self._late or self._spans[latest][2].query():
            self._backlog.queue()
        return record_event(self._device)

    def end(self, signature: Hashable, began: Any) -> None:
        """Note that an op of the kind `signature` ends, which began at `began`."""
        self._spans.append(
            (signature, began, self._host_now() if self._on_cpu else record_event(self._device))
        )
        if not self._on_cpu and not self._backlog.was_ahead(began):
            self._late.add(len(self._spans) - 1)

    def samples(self) -> Samples:
        """Return the run times; those that may include time of the host only if a kind has no others.

        Waits for a device with a stream.
        """
        if not self._on_cpu and self._spans:
            torch.get_device_module(self._device).synchronize(self._device)
        on_time = {span[0] for i, span in enumerate(self._spans) if i not in self._late}
        found: Samples = {}
        for i, (signature, began, ended) in enumerate(self._spans):
            if i not in self._late or signature not in on_time:
                found.setdefault(signature, []).append(self._us(began, ended))
        return found

    def gaps_us(self) -> list[float]:
        """Return the times between ops if no work can be queued, for then they are not the host's alone.

        Call `samples` first, which waits for the device.
        """
        if self._backlog.can_queue:
            return []
        return [self._us(ended, began) for (_, _, ended), (_, began, _) in itertools.pairwise(self._spans)]

    def note(self) -> str:
        """Return a sentence on times that may include time of the host; "" if none does."""
        return self._backlog.note()

    def _us(self, began: Any, ended: Any) -> float:
        return float((ended - began) / 1e3 if self._on_cpu else began.elapsed_time(ended) * 1e3)


class OpTimer(TorchDispatchMode):
    """Time the ops of a forward: by the clock on the CPU, by events of the device's stream elsewhere.

    On a GPU, work is queued ahead of each op (backlog.py). If no work can be queued, also time the gaps
    between ops: Python, the dispatcher, freeing memory, a device that waits for its host. A recomputed op
    takes the time of its gap again.

    Attributes:
        generators: the generators that the forward drew from.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device, originals: Originals, backlog: Backlog | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._originals = originals
        self.generators = UsedGenerators()
        self._spans = OpSpans(device, backlog or Backlog(device))
        self._in_function = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        facts = facts_of(func)
        if facts.view:
            return facts.call(*args, **kwargs)
        if facts.draws(args, kwargs):
            self.generators.note(args, kwargs)
        self._originals.keep(facts, args, kwargs)
        call = facts.call
        out = call(*args, **kwargs) if self._in_function else self._time(facts.name, call, args, kwargs)
        self._originals.note_outputs(args, kwargs, out)
        return out

    def run_function(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any], apply: Apply) -> Any:
        """Time a call of a Function as one op."""
        if self._in_function:
            return apply(*args, **kwargs)
        self._in_function = True
        try:
            return self._time(facts_of_function(cls).name, apply, args, kwargs)
        finally:
            self._in_function = False

    def _time(self, name: str, run: Apply, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        signature = signature_of(name, args, kwargs)
        began = self._spans.begin()
        out = run(*args, **kwargs)
        self._spans.end(signature, began)
        return out

    def samples(self) -> Samples:
        """Return the run times. Waits for a device with a stream."""
        found = self._spans.samples()
        if gaps := self._spans.gaps_us():
            found[BETWEEN_OPS] = gaps
        return found


def timed_forward(call: Call, device: torch.device, backlog: Backlog | None = None) -> Samples:
    """Run and time a forward for which autograd saves only descriptions.

    Explicit generators are restored; the default generators are not.
    """
    watch_functions()
    timer = OpTimer(device, call.originals, backlog)
    try:
        with torch.autograd.graph.saved_tensors_hooks(_describe, _ones), torch.enable_grad(), timer:
            call()
    finally:
        torch.clear_autocast_cache()
        timer.generators.restore()
    return timer.samples()


def sample_forwards(
    call: Call,
    device: torch.device,
    total_us: Mapping[Hashable, float],
    forward_s: float,
    left_s: float,
    backlog: Backlog | None = None,
) -> Samples:
    """Run forward until the kinds of op in `total_us` have enough samples.

    Kinds of op that together take a small part of the time (`RARE`) may have fewer.

    Args:
        call: runs forward.
        device: the device of the model.
        total_us: by kind of op, the run time of all its calls in one forward.
        forward_s: estimated time of one forward.
        left_s: time that all forwards together may take.
        backlog: of the device.
    """
    samples: Samples = {}
    now_ns = host_clock(device)
    spent, last = 0.0, forward_s
    for _ in range(SAMPLES):
        lacking = sum(us for key, us in total_us.items() if len(samples.get(key, ())) < SAMPLES)
        if spent + last > left_s or (samples and lacking <= RARE * sum(total_us.values())):
            break
        begin = now_ns()
        found = timed_forward(call, device, backlog)
        for key in total_us.keys() & found.keys():
            samples.setdefault(key, []).extend(found[key])
        last = (now_ns() - begin) / 1e9
        spent += last
    return samples


def _describe(tensor: Tensor) -> Any:
    if not has_storage(tensor):  # sparse, nested: they have no strides
        return tensor.detach()
    return tensor.size(), tensor.stride(), tensor.dtype, tensor.device


def _ones(packed: Any) -> Tensor:
    """Return ones for a model that differentiates inside its forward."""
    if isinstance(packed, Tensor):
        return packed
    size, stride, dtype, device = packed
    return torch.empty_strided(size, stride, dtype=dtype, device=device).fill_(1)


for _function in (_describe, _ones):
    keep_dynamo_out(_function, "it times a forward", recursively=True)


def median_and_spread(
    in_step_us: Sequence[float], signatures: Sequence[Hashable], more: Mapping[Hashable, Sequence[float]]
) -> dict[Hashable, OpTime]:
    """Return median, median absolute deviation and number of samples, by kind of op.

    If `more` has enough samples of a kind, those of the profiled step are not used: recording the allocations
    makes each op a little slower.
    """
    samples: Samples = {BETWEEN_OPS: []} if more.get(BETWEEN_OPS) else {}
    for runtime, signature in zip(in_step_us, signatures, strict=True):
        samples.setdefault(signature, []).append(runtime)
    found: dict[Hashable, OpTime] = {}
    for signature, own in samples.items():
        others = list(more.get(signature, ()))
        used = others if len(others) >= LEAST_SAMPLES else own + others
        median, spread = median_and_deviation(used)
        found[signature] = (round(median, 3), round(spread, 3), len(used))
    return found


def median_and_deviation(samples: Sequence[float]) -> tuple[float, float]:
    """Return the median and the median absolute deviation."""
    median = statistics.median(samples)
    return median, statistics.median(abs(sample - median) for sample in samples)
