"""Test that training on a device, whose first step is observed, has plain numbers and the planned peak."""

from __future__ import annotations

from types import ModuleType

import pytest

from standin.tasks import TASKS, bounds_of, task_of
from standin.training import train

pytestmark = pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")  # of an LSTM


@pytest.mark.parametrize("name", TASKS)
def test_training_whose_first_step_is_observed_has_the_plain_numbers_and_the_predicted_peak(
    gpu: ModuleType, name: str
) -> None:
    task, known = task_of(name), bounds_of(name)
    plain = train(gpu, task, steps=5)
    budget = int(known.floor + 0.5 * (known.ceiling - known.floor))
    planned = train(gpu, task, budget, 5, first_step="observed", group=None)
    report = planned.applied.report()
    assert planned.same_numbers(plain)
    assert planned.peaks[2:] == [report.predicted_peak_bytes] * 3
    assert report.predicted_peak_bytes <= budget  # in the second step, backward also compares contents
    assert report.recomputed > 0
    assert (report.corrections, report.off_path) == (0, "")
