"""A plan for as long as a with-block runs; and what is said where a library is missing."""

from __future__ import annotations

import logging
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ac_client
from ac_client.integrations.loop import planned
from benchmarks.models.modules import Transformer

BUDGET_GB = 0.0026


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Transformer(layers=2, width=32)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, sizes: tuple[int, ...] = (4, 4, 2)) -> None:
    torch.manual_seed(1)
    for size in sizes:
        model(torch.randn(size, 64, 32))["logits"].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_block_is_planned_and_nothing_after_it() -> None:
    (plain, optimizer), (ours, own) = model_and_optimizer(), model_and_optimizer()
    train(plain, optimizer)
    with planned(ours, BUDGET_GB, optimizer=own) as at:
        assert ac_client.applied(ours) is at
        train(ours, own)
    assert all(map(torch.equal, plain.state_dict().values(), ours.state_dict().values()))
    report = at.report()
    assert report.predicted_peak_bytes < report.save_all_peak_bytes
    assert report.steps == 2  # the first one was observed
    assert report.metrics()["autoac/predicted_peak_gb"] <= BUDGET_GB
    assert not ours._forward_pre_hooks


def test_block_that_raises_leaves_nothing_behind() -> None:
    model, optimizer = model_and_optimizer()
    wrong_width = pytest.raises(RuntimeError, match="normalized_shape")
    with wrong_width, planned(model, BUDGET_GB, optimizer=optimizer):
        model(torch.randn(4, 64, 31))
    with pytest.raises(ac_client.NotApplied):
        ac_client.applied(model)
    assert not model._forward_pre_hooks


class Counting(nn.Module):
    """Counts its calls in every way that a model may, and reads an iterator and writes a file in each."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.inner = model_and_optimizer()[0]
        self.calls = [0]
        self.path = path

    def forward(self, batches: Iterator[torch.Tensor]) -> torch.Tensor:
        self.calls[0] += 1
        with self.path.open("a") as file:
            file.write("forward\n")
        logging.getLogger("counting").info("forward")
        return self.inner(next(batches))["logits"]


def test_no_forward_runs_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "counting")
    model = Counting(tmp_path / "calls")
    batches = iter(torch.randn(4, 4, 64, 32))
    with planned(model, BUDGET_GB) as at:
        for _ in range(4):
            model(batches).square().mean().backward()
            model.zero_grad()
    assert at.report().steps == 3
    assert model.calls == [4]
    assert model.path.read_text().count("forward") == 4
    assert sum(record.name == "counting" for record in caplog.records) == 4
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize(
    ("name", "absent", "install"),
    [
        ("transformers", ["transformers"], "transformers accelerate"),
        ("accelerate", ["accelerate"], "accelerate"),
        ("lightning", ["lightning", "pytorch_lightning"], "lightning"),
    ],
)
def test_missing_library_names_its_installation(
    name: str, absent: list[str], install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in absent:
        monkeypatch.delitem(sys.modules, f"{library}.pytorch", raising=False)
        monkeypatch.setitem(sys.modules, library, None)  # as Python marks what cannot be imported
    path = Path(ac_client.__file__).parent / "integrations" / f"{name}.py"
    with pytest.raises(ModuleNotFoundError, match=f"{name} is not installed: pip install {install}$"):
        runpy.run_path(str(path))
