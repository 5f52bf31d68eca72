"""Measuring one row of the demo, on a tiny model."""

import pytest
import torch

from ac_client.demo import child, rows
from ac_client.demo.rows import ChildFailed, Children, Row, policy_path, profile_path
from ac_client.demo.setting import TINY
from ac_client.measure.memory_timeline import LiveBytes
from autoac.planner import Policy, Profile
from benchmarks.demo_table.child import WRAPPERS
from benchmarks.torch_checkpoint import BASELINES


@pytest.mark.parametrize("method", BASELINES)
def test_baseline_needs_less_memory_and_has_the_gradients_of_plain(method, tmp_path):
    plain = child.measure(Row("plain", "plain", pairs=1), TINY, tmp_path)
    found = child.measure(Row("baseline", method, pairs=1), TINY, tmp_path, WRAPPERS)
    assert found.peak_bytes < plain.peak_bytes
    assert found.gradients_equal
    assert found.compared_steps == child.MEMORY_STEPS + 1


def test_ours_stays_within_its_budget_with_the_gradients_of_plain(tmp_path):
    plain = child.measure(Row("plain", "plain", pairs=1), TINY, tmp_path)
    budget = int(0.9 * plain.peak_bytes)
    found = child.measure(Row("ours, 1%", "ours", budget, pairs=1), TINY, tmp_path)
    assert found.peak_bytes <= budget
    assert found.predicted_peak_bytes == pytest.approx(found.peak_bytes, rel=0.01)
    assert found.gradients_equal
    assert found.first_step_s > 0
    policy = Policy.from_json(policy_path(tmp_path, "ours, 1%").read_text())
    assert policy.budget_bytes == budget
    assert "recompute" in policy.decisions.values()
    profile = Profile.from_json(profile_path(tmp_path, "ours, 1%").read_text())
    assert profile.digest == policy.profile_digest


def test_different_gradients_are_noticed(tmp_path, monkeypatch):
    """Another seed gives the model under test other dropout masks."""
    step = child.Trainee.step
    seen = []

    def other_seed_for_the_first(self):
        seen.append(self)
        if self is seen[0]:
            self.seed = 99
        return step(self)

    monkeypatch.setattr(child.Trainee, "step", other_seed_for_the_first)
    assert not child.measure(Row("baseline", "checkpoint", pairs=1), TINY, tmp_path).gradients_equal


def test_gradients_are_compared_by_their_bits():
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert child._same_bits(nan, nan.clone())
    assert not child._same_bits(zero, -zero)


def test_each_row_is_measured_in_its_own_process(tmp_path):
    row = Row("baseline", "checkpoint", pairs=1)
    here = child.measure(row, TINY, tmp_path)
    with Children(TINY, tmp_path) as children:
        first, second = children.measure(row), children.measure(row)
    assert first.peak_bytes == second.peak_bytes  # the first left nothing behind
    assert first.peak_bytes == pytest.approx(here.peak_bytes, rel=0.02)  # garbage is collected when it is
    assert first.gradients_equal


def test_failed_child_reports_its_error_and_the_next_one_runs(tmp_path):
    with Children(TINY, tmp_path) as children:
        with pytest.raises(ChildFailed, match=r"'broken' failed: .*budget"):
            children.measure(Row("broken", "ours", budget_bytes=1, pairs=1))
        assert children.measure(Row("plain", "plain", pairs=1)).peak_bytes > 0


def test_late_child_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "TIMEOUT_S", 0.01)
    with Children(TINY, tmp_path) as children, pytest.raises(ChildFailed, match=r"no result in 0\.01 s"):
        children.measure(Row("plain", "plain", pairs=1))


def test_thinned_timeline_keeps_the_peak_and_the_end():
    changes = [LiveBytes(1000 * i, live) for i, live in enumerate([1, 5, 2, 9, 3, 4, 0, 7, 6, 2])]
    thin = child.since(changes, changes[1], points=4)
    assert thin[0] == (0.0, 5)
    assert max(live for _, live in thin) == 9
    assert thin[-1] == (0.008, 2)
    assert len(thin) < len(changes)
