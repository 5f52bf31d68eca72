"""Find the largest batch of each way to train, in the memory that plain training needs for a few samples."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import ac_client
from ac_client.demo.rows import Row, measure
from ac_client.demo.setting import DecoderSetting
from ac_client.measure.forked_call import iterate_in_child, run_in_child
from autoac.planner import Policy

SAMPLES = 4  # of the plain step whose peak is the memory
MOST = 32  # samples that `fit` considers


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The largest batch of one way to train, and the peak of a real step of it."""

    row: Row
    samples: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class LargestBatches:
    """The rows, plain first, within the same memory."""

    setting: DecoderSetting
    budget_bytes: int
    rows: tuple[LargestBatch, ...]


def largest_batches(setting: DecoderSetting) -> LargestBatches:
    """Ask `fit` for the largest batch of plain and of ours, and try larger ones under the checkpoint.

    Each step runs in a process of its own.
    """

    def measured(method: str, samples: int, policy: Policy | None = None) -> LargestBatch:
        row = Row(method, policy.budget_bytes if policy else None)
        with closing(iterate_in_child(measure, row, replace(setting, batch=samples), None, policy)) as parts:
            memory: Any = next(parts)
        return LargestBatch(row, samples, memory.peak_bytes)

    budget = measured("plain", SAMPLES).peak_bytes
    all_saved, largest, policy = run_in_child(_fit, setting, budget)
    checkpointed = measured("checkpoint", all_saved)
    while (larger := measured("checkpoint", checkpointed.samples + 1)).peak_bytes <= budget:
        checkpointed = larger
    rows = measured("plain", all_saved), checkpointed, measured("ours", largest, policy)
    return LargestBatches(setting, budget, rows)


def _fit(setting: DecoderSetting, budget_bytes: int) -> tuple[int, int, Policy]:
    def sized(samples: int) -> dict[str, Any]:
        return {"model": setting.build(), "kwargs": replace(setting, batch=samples).inputs()}

    found = ac_client.fit(sized, budget_bytes / 2**30, most=MOST, accumulates=setting.keep_gradients)
    return found.all_saved, found.largest, found.row(found.largest).plan.policy()
