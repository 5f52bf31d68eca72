"""Measure the time that recording an op and running it again take in addition to its run time."""

from __future__ import annotations

import functools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

from ac_client.runtime.policy_context import active, save_recompute_policy
from autoac.profiler.torch_facts import private

REPEATS = 24
EMPTIES = 4 << 20  # numbers that are read, and written, between two ops: more than a core's own caches hold


def recording_us(repeats: int = REPEATS) -> float:
    """What recording adds to an op on the CPU, in microseconds of this thread's time; 0 if nothing.

    Measured on the spot, in half a second, with 32 MiB: an op that does nearly nothing, and whose output
    autograd saves, is run in a region and outside of one, and let go. Before each, another kernel goes
    through more memory than caches hold, as the kernels of a training step do. What Python and torch touch on
    the way through a dispatch mode then comes from far, and takes some ten times as long as in a tight loop.

    Ops that a region saves take a little less. Those of module calls that run without the mode take nothing.

    Raises:
        RuntimeError: a region is open on this thread.
    """
    if active.region is not None:
        raise RuntimeError("recording cannot be measured within a region: measure outside of forward")
    numbers = torch.ones(EMPTIES)
    target = torch.empty_like(numbers)
    tiny = torch.ones(8, requires_grad=True)

    def taken_us() -> float:
        unseen = private.DisableTorchDispatch()
        torch.mul(numbers, 2.0, out=target)
        del unseen
        began = time.thread_time_ns()
        tiny.tanh()
        return (time.thread_time_ns() - began) / 1e3

    plain, recorded = [], []
    for _ in range(repeats):
        plain.append(taken_us())
        with save_recompute_policy("recompute_all"):
            tiny.tanh()  # the first op of a region is no op like others
            recorded.append(taken_us())
    return max(0.0, statistics.median(recorded) - statistics.median(plain))


@functools.cache
def recording_us_of_process() -> float:
    """`recording_us`, measured when it is first asked for and remembered."""
    return recording_us()


CHAIN = 64  # ops that run again in one burst
ROUNDS = 5


def replay_us(rounds: int = ROUNDS) -> float:
    """Return what running an op again adds to its run time on the CPU, in whole microseconds.

    That is what the runtime does to record the op, to hold it, and to run it again. Plans count it, so that
    they leave alone what costs more to run again than it saves. A chain of tiny ops is run in a region and
    outside of one, in some ten milliseconds, with caches warm: in a training step it takes longer.
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
    recomputed, saved = (min(column) for column in zip(*pairs, strict=True))
    return float(max(0, round((recomputed - saved) / CHAIN)))


@functools.cache
def replay_us_of_process() -> float:
    """`replay_us`, measured when it is first asked for and remembered.

    On a thread of its own, where no mode, hook or region of the caller is in force.
    """
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(replay_us).result()
