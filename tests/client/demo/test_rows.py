"""Measuring one row of the demo, on a tiny model."""

from dataclasses import replace
from functools import partial

import pytest

from ac_client.demo import comparison, rows
from ac_client.demo.rows import Row, measure
from ac_client.demo.setting import TINY
from ac_client.measure.forked_call import run_in_child
from ac_client.measure.memory_timeline import LiveBytes
from benchmarks.torch_checkpoint import BASELINES, wrap_blocks

WRAPPERS = {baseline: partial(wrap_blocks, baseline=baseline) for baseline in BASELINES}


@pytest.mark.parametrize("method", BASELINES)
def test_baseline_needs_less_memory_and_has_the_gradients_of_plain(method):
    plain = measure(Row("plain", "plain", pairs=1), TINY)
    found = measure(Row("baseline", method, pairs=1), TINY, WRAPPERS)
    assert found.peak_bytes < plain.peak_bytes
    assert found.gradients_equal
    assert found.compared_steps == rows.MEMORY_STEPS + 1
    assert plain.compared_steps == 0


def test_ours_stays_within_its_budget_with_the_gradients_of_plain():
    plain = measure(Row("plain", "plain", pairs=1), TINY)
    budget = int(0.9 * plain.peak_bytes)
    found = measure(Row("ours, 1%", "ours", budget, pairs=1), TINY)
    assert found.peak_bytes <= budget
    assert found.policy.predicted.peak_bytes == pytest.approx(found.peak_bytes, rel=0.01)
    assert found.gradients_equal
    assert found.compared_steps == rows.MEMORY_STEPS + 1 + rows.FIRST_STEPS
    assert min(found.first_steps_s) > 0
    assert found.policy.budget_bytes == budget
    assert "recompute" in found.policy.decisions.values()
    assert found.profile.digest == found.policy.profile_digest


@pytest.mark.parametrize("number", [0, 1])
def test_different_gradients_are_noticed(monkeypatch, number):
    """Another seed gives the first or the second trainee of our row other dropout masks."""
    step = rows.Trainee.step
    seen = []

    def step_with_another_seed(self):
        if self not in seen:
            seen.append(self)
        if self is seen[min(number, len(seen) - 1)] and len(seen) == number + 1:
            self.seed = 99
        step(self)

    budget = int(0.9 * measure(Row("plain", "plain", pairs=1), TINY).peak_bytes)
    monkeypatch.setattr(rows.Trainee, "step", step_with_another_seed)
    assert not measure(Row("ours", "ours", budget, pairs=1), TINY).gradients_equal


@pytest.mark.usefixtures("one_thread")
def test_each_row_is_measured_in_its_own_process():
    row = Row("baseline", "checkpoint", pairs=1)
    first, second = run_in_child(measure, row, TINY), run_in_child(measure, row, TINY)
    assert first.peak_bytes == second.peak_bytes  # the first left nothing behind
    assert first.gradients_equal


@pytest.mark.usefixtures("one_thread")
def test_comparison_measures_ours_at_the_peak_of_the_checkpoint(monkeypatch):
    names = []
    result = comparison.run(TINY, pairs=1, on_row=lambda name, number, of: names.append((number, of)))
    assert names == [(1, 3), (2, 3), (3, 3)]
    _, checkpoint, ours = result.lines
    assert ours.row.budget_bytes == checkpoint.measured.peak_bytes
    assert not result.failed


@pytest.mark.usefixtures("one_thread")
def test_failed_or_late_child_is_reported(capfd):
    with pytest.raises(RuntimeError, match=r"measure.* failed; see the traceback above"):
        run_in_child(measure, Row("broken", "ours", budget_bytes=1, pairs=1), TINY)
    assert "budget" in capfd.readouterr().err
    with pytest.raises(TimeoutError, match=r"measure must end within 0\.0 s"):
        run_in_child(measure, Row("plain", "plain", pairs=1), TINY, limit_s=0.0)


def test_row_that_fails_is_named(capfd):
    with pytest.raises(RuntimeError, match=r"row 1 \(plain\) could not be measured"):
        comparison.run(replace(TINY, heads=3))
    assert "divisible" in capfd.readouterr().err


def test_thinned_timeline_keeps_the_peak_and_the_end():
    changes = [LiveBytes(1000 * i, live) for i, live in enumerate([1, 5, 2, 9, 3, 4, 0, 7, 6, 2])]
    thin = rows.since(changes, changes[1], points=4)
    assert thin[0] == (0.0, 5)
    assert max(live for _, live in thin) == 9
    assert thin[-1] == (0.008, 2)
    assert len(thin) < len(changes)
