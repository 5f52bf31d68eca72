"""Check the comparison of real steps on a small model."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models.batches import tokens
from benchmarks.models.gpt2 import gpt2
from benchmarks.public import training
from benchmarks.public.torch_ways import TrainingCase, ways
from benchmarks.public.training import measure_case, render

pytestmark = pytest.mark.filterwarnings("ignore:.*PuLP 4.0:DeprecationWarning")  # torch's own calls


def make():
    torch.manual_seed(0)
    return gpt2(layers=3, width=64, heads=2, vocabulary=128, positions=64), tokens(2, 64, 128)


CASE = TrainingCase("tiny GPT-2", make, lambda model: list(model.transformer.h))


def test_our_step_peaks_as_predicted_within_the_peak_of_each_other_way(monkeypatch):
    """Without `activation_memory_budget`, which takes long to compile."""
    eager = ("checkpoint", "selective", "xformers-style")
    monkeypatch.setattr(training, "ways", lambda *args: {way: ways(*args)[way] for way in eager})
    rows = measure_case(CASE, rounds=1)
    assert tuple(row.way for row in rows) == eager
    for row in rows:
        assert row.theirs is not None, row.note
        assert row.ours == row.predicted <= row.theirs, row.note
        assert row.equal
        assert row.theirs_equal
    assert "3 of 3 peaks as predicted to the byte, 0 over budget" in render(rows)
