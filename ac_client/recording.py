"""What recording takes: an op of forward costs more while the runtime is there to see it."""

from __future__ import annotations

import functools
import statistics
import time

import torch

from ac_client.runtime import active, save_recompute_policy

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
        unseen = torch._C._DisableTorchDispatch()
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
