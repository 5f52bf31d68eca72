"""Test the compiled plan of a model with batch norms, a short version of `make bench-compiled`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoac.planner import Profile
from autoac.profiler import profile
from benchmarks.compiled_peaks import compare
from benchmarks.models.tiny import ZOO

(DENSENET,) = (entry for entry in ZOO if entry.name == "DenseNet")


def test_peak_is_exact_and_results_are_the_same() -> None:
    (row,) = compare(DENSENET, shares=[0.25])
    assert row.recomputed > 0
    assert row.same_results
    assert row.measured == row.predicted <= row.budget


def test_batch_norms_that_train_may_run_again() -> None:
    """Their running statistics are written, but no other result depends on those."""
    training: Any = torch.compile(DENSENET.make().train(), backend="aot_eager")
    assert not any("batch_norm" in key for key in kept(profile(training, **DENSENET.batch())))


def test_batch_norms_that_read_their_running_statistics_are_saved_if_forward_writes_them() -> None:
    class Mixed(nn.Module):
        """Trains a batch norm, then applies its statistics."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            mean, var = self.norm.running_mean, self.norm.running_var
            applied = functional.batch_norm(x.tanh(), mean, var, training=False)
            return (self.norm(x.sin()).cos() * applied).sum()

    found = profile(torch.compile(Mixed(), backend="aot_eager"), torch.randn(16, 8))  # type: ignore[arg-type]
    assert any("batch_norm" in key for key in kept(found))


def kept(found: Profile) -> list[str]:
    """Return the keys of ops that must be saved."""
    return [key for key, reason in zip(found.keys(), found.ops.must_save, strict=True) if reason >= 0]
