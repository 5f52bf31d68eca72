"""A planned step on a device that is not the CPU: the predicted peak, and the plain step's numbers."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import pytest
import torch
from models import Transformer
from torch import Tensor, nn
from torch.nn import functional as F

import ac_client
from autoac.planner import Bounds, Profile, bounds, build, simulate
from autoac.planner.units import GIB
from standin.training import Task, Training, step, train


class LanguageModel(nn.Module):
    """Embedding, blocks with dropout, a head and the loss."""

    def __init__(self, width: int = 32, vocabulary: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = Transformer(width=width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.blocks(self.embedding(ids))["logits"])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten()), "logits": logits}


def ids() -> dict[str, Any]:
    return {"ids": torch.arange(4 * 32).remainder(61).reshape(4, 32)}


def gpt2() -> Task:
    """GPT-2 of transformers, with its dropout of 0.1."""
    from zoo import ZOO

    entry = next(entry for entry in ZOO if entry.name == "GPT-2")
    return Task(entry.make, entry.batch)


def convnet() -> Task:
    """A U-Net: convolutions, batch norms, in-place activations, long skips."""
    from zoo import ZOO

    entry = next(entry for entry in ZOO if entry.name == "U-Net")
    return Task(entry.make, entry.batch)


TASKS = {
    "GPT-2": gpt2,
    "convnet": convnet,
    "cuda:1": lambda: Task(LanguageModel, ids, device="cuda:1"),
    "bf16 autocast": lambda: Task(
        LanguageModel, ids, context=lambda: torch.autocast("cuda", dtype=torch.bfloat16)
    ),
}


@functools.cache
def task_of(name: str) -> Task:
    return TASKS[name]()


@functools.cache
def profile_of(name: str) -> Profile:
    return task_of(name).observed()


@functools.cache
def bounds_of(name: str) -> Bounds:
    return bounds(build(profile_of(name)))


_plain: dict[str, Training] = {}


def plain(gpu: ModuleType, name: str) -> Training:
    if name not in _plain:
        _plain[name] = train(gpu, task_of(name))
    return _plain[name]


@pytest.mark.parametrize("name", TASKS)
def test_a_plain_step_peaks_as_predicted_for_saving_everything(gpu: ModuleType, name: str) -> None:
    assert gpu.live(0) == gpu.live(1) == 0
    assert plain(gpu, name).peaks[-1] == bounds_of(name).ceiling


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *(("GPT-2", part) for part in (0.9, 0.7, 0.4, 0.2)),
        ("convnet", 0.4),
        ("cuda:1", 0.4),
        ("bf16 autocast", 0.4),
    ],
)
def test_a_planned_step_peaks_as_predicted_with_the_plain_numbers(
    gpu: ModuleType, name: str, part: float
) -> None:
    known = bounds_of(name)
    budget = int(known.floor + part * (known.ceiling - known.floor))
    planned = train(gpu, task_of(name), budget)
    report = planned.applied.report()
    assert planned.peaks[-1] == report.predicted_peak_bytes <= budget
    assert max(planned.peaks) == planned.peaks[-1]
    assert report.recomputed > 0
    assert (report.corrections, report.off_path) == (0, "")
    assert planned.same_numbers(plain(gpu, name))


def test_a_measured_step_has_the_predicted_peak_and_its_page(gpu: ModuleType) -> None:
    task, known = task_of("GPT-2"), bounds_of("GPT-2")
    model, optimizer, batch = task.made()
    ac_client.apply(model, (known.floor + known.ceiling) / 2 / GIB, optimizer=optimizer)
    at, done = ac_client.applied(model), Training(None)
    for _ in range(2):
        step(task, model, optimizer, batch, done)
        optimizer.zero_grad()
    with at.measure():
        step(task, model, optimizer, batch, done)
    report = at.report()
    assert report.measured_peak_bytes == report.predicted_peak_bytes
    assert report.corrections == 0


def test_a_plain_step_in_profiling_holds_what_the_simulator_says(gpu: ModuleType) -> None:
    found = task_of("GPT-2").observed(mode="measured")
    note = next(note for note in found.notes if "a plain step held" in note)
    graph = build(found)
    peak = simulate(graph, graph.everything).peak.live_bytes
    assert int(note.split("held ")[1].split()[0]) == peak - found.static.total
    assert found.keys() == profile_of("GPT-2").keys()


def test_checkpoint_holds_less_and_has_the_plain_gradients(gpu: ModuleType) -> None:
    model, _, batch = task_of("cuda:1").made()
    peaks, gradients = [], []
    for around in (lambda block, x: block(x), ac_client.checkpoint):
        torch.cuda.manual_seed_all(0)
        model.zero_grad()
        gpu.reset_peak(1)
        x = model.embedding(batch["ids"])
        for block in model.blocks.blocks:
            x = around(block, x)
        x.square().mean().backward()
        del x
        peaks.append(gpu.peak(1))
        gradients.append([p.grad.cpu() for p in model.blocks.blocks.parameters()])
    assert peaks[1] < peaks[0]
    assert all(map(torch.equal, *gradients))


def test_a_step_that_runs_out_of_memory_runs_again_under_a_tighter_plan(gpu: ModuleType) -> None:
    task, known = task_of("cuda:1"), bounds_of("cuda:1")
    reference = train(gpu, task, steps=3)
    model, optimizer, batch = task.made()
    ac_client.apply(model, known.ceiling * 1.2 / GIB, optimizer=optimizer)
    at, done = ac_client.applied(model), Training(None)

    def backward() -> dict[str, Tensor]:
        out = model(**batch)
        out["loss"].backward()
        return {"loss": out["loss"].detach()}

    for i in range(3):
        torch.cuda.manual_seed_all(i)
        if i == 2:
            assert at.report().recomputed == 0
            gpu.set_limit(1, int(known.ceiling * 0.95))
        out = at.step(backward, retry_oom=True)
        gpu.set_limit(1, 1 << 50)
        done.losses.append(out["loss"].cpu())
        done.gradients.append([p.grad.cpu().clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    report = at.report()
    assert report.retries == 1
    assert report.recomputed > 0
    assert done.same_numbers(reference)
