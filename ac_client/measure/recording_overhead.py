"""Measure the time that the runtime adds to an op: to record it in forward, and to replay it in backward."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import NamedTuple, TypeVar

import torch

from autoac.planner import Profile
from autoac.tape.runtime.policy_context import active, save_recompute_policy
from autoac.tape.torch_facts import private

T = TypeVar("T")

REPEATS = 24
EVICTED_BY = 4 << 20  # numbers read and written between two ops: more than the caches of a core hold


def recording_us(repeats: int = REPEATS) -> float:
    """Return the time that recording adds to an op on the CPU, in microseconds of this thread's CPU time.

    The measurement takes half a second and 32 MiB: a tiny op whose output autograd saves runs inside a region
    and outside of one. Before each run, another kernel touches more memory than the caches hold, as the
    kernels of a training step do. The code and data of a dispatch mode then come from main memory, which
    takes about ten times as long as in a tight loop.

    Saved ops take a little less than recorded ones. Ops of modules that run without the mode take nothing.

    Raises:
        RuntimeError: a region is open on this thread.
    """
    if active.region is not None:
        raise RuntimeError(
            "recording must be measured outside of regions, got an open region: measure outside of forward"
        )
    numbers = torch.ones(EVICTED_BY)
    target = torch.empty_like(numbers)
    tiny = torch.ones(8, requires_grad=True)

    def tiny_op_us() -> float:
        unseen = private.DisableTorchDispatch()
        torch.mul(numbers, 2.0, out=target)
        del unseen
        began = time.thread_time_ns()
        tiny.tanh()
        return (time.thread_time_ns() - began) / 1e3

    plain, recorded = [], []
    for _ in range(repeats):
        plain.append(tiny_op_us())
        with save_recompute_policy("recompute_all"):
            first = tiny.tanh()  # the first op of a region takes longer
            recorded.append(tiny_op_us())
        first.backward(numbers[:8])  # until a backward has run, recording compares contents as well
    return max(0.0, statistics.median(recorded) - statistics.median(plain))


@functools.cache
def recording_us_of_process() -> float:
    """Return `recording_us`, measured at the first call and cached."""
    return _on_new_thread(recording_us)


CHAIN = 64  # ops in one recompute burst
ROUNDS = 5


class HostTimes(NamedTuple):
    """Times that an op takes on the host: a CPU, forward and backward together, in whole microseconds."""

    plain_us: float  # without a plan
    replay_us: float  # that recording and replaying the op add


def host_times(rounds: int = ROUNDS) -> HostTimes:
    """Return the times that the host takes for an op without a plan, and to recompute it.

    The latter covers recording the op, holding the record, and replaying it. Plans include it, so that they
    do not recompute ops for which it outweighs the memory. The measurement runs a chain of tiny ops, plain,
    recomputed and saved, for about ten milliseconds with warm caches; a training step takes longer.
    """

    def step_us(policy: str | None) -> float:
        tiny = torch.ones(8, device="cpu", requires_grad=True)
        began = time.thread_time_ns()
        with save_recompute_policy(policy) if policy is not None else nullcontext():
            out = tiny
            for _ in range(CHAIN):
                out = out.tanh()
        out.backward(tiny.detach())
        return (time.thread_time_ns() - began) / 1e3

    with torch.enable_grad():
        pairs = [(step_us("recompute_all"), step_us("must_save_all")) for _ in range(rounds)]
        plain = min(step_us(None) for _ in range(rounds))
    recomputed, saved = (min(column) for column in zip(*pairs, strict=True))
    return HostTimes(float(round(plain / CHAIN)), float(max(0, round((recomputed - saved) / CHAIN))))


def host_us(profile: Profile, times: HostTimes) -> float:
    """Return the time that the host takes for the step of `profile` if it records and replays every op."""
    return len(profile.ops) * (times.plain_us + times.replay_us)


def is_host_bound(profile: Profile, times: HostTimes) -> bool:
    """Return True if the host takes longer for the step than the device.

    On a CPU the time always adds to the step. A device that runs behind its host hides it otherwise.
    """
    device_us = sum(profile.ops.runtime_us) + sum(profile.backward.runtime_us)
    return profile.environment.device_type != "cpu" and host_us(profile, times) > device_us


@functools.cache
def host_times_of_process() -> HostTimes:
    """Return `host_times`, measured at the first call and cached."""
    return _on_new_thread(host_times)


def _on_new_thread(measure: Callable[[], T]) -> T:
    """Call `measure` on a new thread, where no mode, hook or region of the caller is in force."""
    with ThreadPoolExecutor(1) as alone:
        try:
            running = alone.submit(measure)
        except RuntimeError:  # the interpreter ends, and starts no thread any more: nothing is in force
            return measure()
        return running.result()
