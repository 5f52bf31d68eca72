"""Check the comparison of real steps on a small model."""

from __future__ import annotations

import collections
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoac.profiler import profile
from benchmarks.models.batches import tokens
from benchmarks.models.gpt2 import gpt2
from benchmarks.public import training
from benchmarks.public.torch_ways import TrainingCase, ways
from benchmarks.public.training import leave_plain, measure_case, peak_of, prepared, render

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


class Counter(TorchDispatchMode):
    """Count the ops that really run; selective checkpoint answers for saved ones before they come here."""

    def __init__(self):
        super().__init__()
        self.ran = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_the_xformers_style_policy_saves_memory_and_recomputes_less_than_checkpoint():
    model, batch = make()
    found = profile(model, **batch)
    equal = found.ops.model_copy(update={"runtime_us": (1.0,) * len(found.ops.runtime_us)})
    other_ways = ways(
        CASE, found.model_copy(update={"ops": equal})
    )  # measured times choose other ops each time
    ran = {}
    for way in ("checkpoint", "xformers-style"):
        trainee = prepared(CASE, other_ways[way])
        with Counter() as counter:
            trainee.step()
        ran[way] = counter.ran["aten.addmm.default"]
    assert 12 < ran["xformers-style"] < ran["checkpoint"]  # three layers with four products each
    peaks = [
        peak_of(partial(prepared, CASE, prepare)) for prepare in (other_ways["xformers-style"], leave_plain)
    ]
    assert peaks[0] < peaks[1]
