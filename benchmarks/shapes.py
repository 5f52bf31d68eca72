"""Measure what finding the policy for a batch's shape costs at each forward: `python -m benchmarks.shapes`.

A known shape is one lookup in a table. A new shape is compared with the buckets, here 32, of which only the
largest covers it. The check for changed `requires_grad` flags is measured too. Medians over many calls, in
microseconds of this thread's CPU time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ac_client.planning.batch_shape import key_of, shape_of
from ac_client.planning.loaded_policy import LoadedPolicy, PlannedBucket
from ac_client.planning.policy_store import MOST_BUCKETS, ShapeBuckets
from ac_client.planning.trained_parameters import TrainedParameters
from autoac.planner import Policy, plan
from autoac.profiler import profile
from benchmarks.results import markdown_table

BATCHES: dict[str, Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "one tensor": lambda n: ((torch.empty(4, n),), {}),
    "four keywords, as of a language model": lambda n: (
        (),
        {
            "input_ids": torch.empty(4, n, dtype=torch.long),
            "attention_mask": torch.empty(4, n, dtype=torch.bool),
            "labels": torch.empty(4, n, dtype=torch.long),
            "use_cache": False,
        },
    ),
    "a list of 16 images and their boxes": lambda n: (
        ([torch.empty(3, n, n) for _ in range(16)], [{"boxes": torch.empty(n, 4)} for _ in range(16)]),
        {},
    ),
}


def filled(policy: Policy, of: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]) -> ShapeBuckets:
    """Return as many buckets as are allowed, of growing size."""
    buckets = ShapeBuckets()
    for i in range(MOST_BUCKETS):
        args, kwargs = of(8 * (i + 1))
        buckets.add(PlannedBucket(shape_of(args, kwargs), LoadedPolicy(policy)))
    return buckets


def median_us(call: Callable[[], object], calls: int = 2000) -> float:
    times = []
    for _ in range(calls):
        began = time.thread_time_ns()
        call()
        times.append(time.thread_time_ns() - began)
    return statistics.median(times) / 1e3


def main() -> None:
    found = profile(torch.nn.Linear(4, 4), torch.randn(2, 4))
    policy = plan(found, budget_gb=1.0).policy()
    rows = []
    for name, of in BATCHES.items():
        buckets = filled(policy, of)
        args, kwargs = of(8 * MOST_BUCKETS - 1)
        key = key_of(args, kwargs)

        def lookup_known(args: Any = args, kwargs: Any = kwargs, buckets: ShapeBuckets = buckets) -> object:
            return buckets.known.get(key_of(args, kwargs))

        def lookup_new(args: Any = args, kwargs: Any = kwargs, buckets: ShapeBuckets = buckets) -> None:
            key = key_of(args, kwargs)
            loaded = buckets.known.get(key) or buckets.covering(args, kwargs)
            assert loaded is not None
            buckets.remember(key, loaded)
            buckets.known.clear()

        new = median_us(lookup_new)
        lookup_new()
        buckets.remember(key, buckets.all[-1])
        rows.append([name, f"{median_us(lookup_known):.1f}", f"{new:.1f}"])
    print(markdown_table(["batch", "known shape, us", "new shape, us"], rows))
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(500)])
    parameters = TrainedParameters(model)
    look = median_us(lambda: parameters.sample_changed(model))
    print(f"\nLook for changes among 1,000 parameters: {look:.1f} us")


if __name__ == "__main__":
    main()
