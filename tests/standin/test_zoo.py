"""Test real architectures on the device, in float32 and under CUDA's autocast to bfloat16.

CI runs a part of them; `make nightly` runs all, with AUTOAC_ZOO=all.
"""

from __future__ import annotations

import contextlib
import functools
import os
from types import ModuleType

import pytest
import torch

from autoac.planner import bounds, build, find_minimum_peak
from benchmarks.models.tiny import ZOO
from standin.training import Task, train

pytestmark = pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")  # of an LSTM

CASTINGS = {
    "fp32": contextlib.nullcontext,
    "bf16 autocast": functools.partial(torch.autocast, "cuda", dtype=torch.bfloat16),
}
IN_CI = {("Llama", "bf16 autocast"), ("Mixtral", "bf16 autocast"), ("ResNet", "fp32"), ("T5", "fp32")}
ALL = [(entry.name, casting) for entry in ZOO for casting in CASTINGS]
SUBJECTS = ALL if os.environ.get("AUTOAC_ZOO") == "all" else [one for one in ALL if one in IN_CI]


@pytest.mark.parametrize(("name", "casting"), SUBJECTS)
def test_plan_has_the_predicted_peak_and_the_plain_numbers(gpu: ModuleType, name: str, casting: str) -> None:
    entry = next(entry for entry in ZOO if entry.name == name)
    task = Task(entry.make, entry.batch, context=CASTINGS[casting])
    found = task.observed()
    plain = train(gpu, task)
    ceiling = bounds(build(found)).ceiling
    assert plain.peaks[-1] == ceiling
    smallest = find_minimum_peak(found, gap=0.3, work_limit=1.0).found
    assert smallest < ceiling
    budget = (smallest + ceiling) // 2
    planned = train(gpu, task, budget)
    report = planned.applied.report()
    assert planned.peaks[-1] == report.predicted_peak_bytes <= budget
    assert max(planned.peaks[2:]) == planned.peaks[-1]  # before, backward also compares contents
    assert report.recomputed > 0
    assert (report.corrections, report.off_path) == (0, "")
    assert planned.same_numbers(plain)
