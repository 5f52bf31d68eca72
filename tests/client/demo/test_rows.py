"""Measuring the rows of the demo, on a tiny model."""

from dataclasses import replace
from functools import partial
from itertools import islice

import pytest

from ac_client.demo import comparison, rows
from ac_client.demo.comparison import Line
from ac_client.demo.largest_batch import largest_batches
from ac_client.demo.rows import Row, measure
from ac_client.demo.setting import TINY, UNetSetting
from ac_client.measure.forked_call import iterate_in_child, run_in_child
from ac_client.measure.memory_timeline import LiveBytes
from benchmarks.torch_checkpoint import BASELINES, wrap_blocks

SMALL_U_NET = UNetSetting(channels=4, pixels=16)
WRAPPERS = {baseline: partial(wrap_blocks, baseline=baseline) for baseline in BASELINES}


def measured(row, setting=TINY):
    """Return the line of `row` with two timed steps, measured in this process."""
    memory, *steps = islice(measure(row, setting, WRAPPERS), 3)
    return Line(row, memory, tuple(steps))


@pytest.mark.parametrize("method", BASELINES)
def test_baseline_needs_less_memory_and_has_the_gradients_of_plain(method):
    plain, found = measured(Row("plain")), measured(Row(method))
    assert found.peak_bytes < plain.peak_bytes
    assert found.equal_steps(plain) == [True] * (rows.MEMORY_STEPS + 2)


@pytest.mark.parametrize("setting", [TINY, SMALL_U_NET])
def test_ours_stays_within_its_budget_with_the_gradients_of_plain(setting):
    plain = measured(Row("plain"), setting)
    budget = int(0.9 * plain.peak_bytes)
    found = measured(Row("ours", budget), setting)
    assert found.peak_bytes <= budget
    policy = found.memory.policy
    assert found.predicted_peak_bytes == pytest.approx(found.peak_bytes, rel=0.01)
    assert found.equal_steps(plain) == [True] * (rows.FIRST_STEPS + rows.MEMORY_STEPS + 2)
    assert min(step.cpu_s for step in found.memory.first_steps) > 0
    assert policy.budget_bytes == budget
    assert "recompute" in policy.decisions.values()
    assert found.memory.profile.digest == policy.profile_digest


def test_different_gradients_are_noticed():
    """Another seed gives other dropout masks."""
    plain = measured(Row("plain"))
    ours = Row("ours", int(0.9 * plain.peak_bytes))
    assert not any(measured(ours, replace(TINY, seed=99)).equal_steps(plain))


@pytest.mark.usefixtures("one_thread")
def test_comparison_measures_each_model_in_three_ways():
    starts = []
    result = comparison.run([TINY, SMALL_U_NET], TINY, turns=2, on_start=lambda *start: starts.append(start))
    assert [done for _, done, _ in starts] == [0, *range(20, 50, 5), 50, 51]
    assert {total for _, _, total in starts} == {52}
    for model in result.models:
        assert model.ours.row.budget_bytes == model.lines[1].peak_bytes
        assert all(len(line.steps) == 2 for line in model.lines)
    assert not result.failed


@pytest.mark.usefixtures("one_thread")
def test_largest_batch_of_ours_is_larger_and_fits():
    found = largest_batches(replace(TINY, keep_gradients=False))
    plain, checkpoint, ours = found.rows
    assert plain.samples == 4 <= checkpoint.samples < ours.samples
    assert plain.peak_bytes == found.budget_bytes >= max(checkpoint.peak_bytes, ours.peak_bytes)


@pytest.mark.usefixtures("one_thread")
def test_turns_end_at_the_time_limit(monkeypatch):
    monkeypatch.setattr(comparison, "LEAST_TURNS", 3)
    monkeypatch.setattr(comparison, "largest_batches", lambda setting: None)
    result = comparison.run([TINY], turns=100, limit_s=0)
    assert {len(line.steps) for line in result.models[0].lines} == {3}


@pytest.mark.usefixtures("one_thread")
def test_each_row_is_measured_in_its_own_process():
    row = Row("checkpoint")
    children = [iterate_in_child(measure, row, TINY) for _ in range(2)]
    first, second = map(next, children)
    assert first.peak_bytes == second.peak_bytes  # the first left nothing behind
    assert next(children[0]).digest == next(children[1]).digest
    for child in children:
        child.close()


@pytest.mark.usefixtures("one_thread")
def test_failed_or_late_child_is_reported(capfd):
    with pytest.raises(RuntimeError, match=r"measure.* failed; see the traceback above"):
        next(iterate_in_child(measure, Row("ours", budget_bytes=1), TINY))
    assert "budget" in capfd.readouterr().err
    with pytest.raises(TimeoutError, match=r"measured.* must end within 0\.0 s"):
        run_in_child(measured, Row("plain"), limit_s=0.0)


def test_row_that_fails_is_named(capfd):
    with pytest.raises(RuntimeError, match=r"measure\(Row\(method='plain'.* failed"):
        comparison.run([TINY], replace(TINY, heads=3))
    assert "divisible" in capfd.readouterr().err


def test_timeline_begins_with_the_step():
    changes = [LiveBytes(1000 * i, live) for i, live in enumerate([1, 5, 2])]
    assert rows.since(changes, changes[1]) == [(0.0, 5), (0.0, 5), (0.001, 2)]
