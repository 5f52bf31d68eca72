"""Define the models that are trained on the stand-in, with their profiles."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoac.planner import Bounds, Profile, bounds, build, find_minimum_peak
from benchmarks.models.modules import Transformer
from standin.training import Task
from tests.client.observing.test_inner_backwards import Equilibrium, SeveralBackwards

in_bf16 = functools.partial(torch.autocast, "cuda", dtype=torch.bfloat16)


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


def rows() -> dict[str, Any]:
    return {"x": torch.randn(512, 16)}


def ids() -> dict[str, Any]:
    return {"ids": torch.arange(4 * 32).remainder(61).reshape(4, 32)}


class WithLoss(nn.Module):
    """Return the loss of a model in a dict. It gets a copy of the batch, which it may differentiate."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = make()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.model(x.clone())}


class SideStream(nn.Module):
    """Make a stream in the first forward, and run a part there: a profile leaves no trace of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside, self.last = (Transformer(layers=1) for _ in range(3))
        self.stream: torch.cuda.Stream | None = None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        x = self.first(x)["logits"]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            aside = self.aside(x)["logits"]
        last = self.last(x)["logits"]
        torch.cuda.current_stream().wait_stream(self.stream)
        aside.record_stream(torch.cuda.current_stream())
        return {"loss": (aside * last).mean()}


def of_zoo(name: str) -> Task:
    from benchmarks.models.tiny import ZOO

    name, *casts = name.split(", ")
    entry = next(entry for entry in ZOO if entry.name == name)
    return Task(entry.make, entry.batch, context=in_bf16 if "bf16" in casts else nullcontext)


def zoo() -> list[str]:
    """Return real architectures, in float32 and in bfloat16: all with AUTOAC_ZOO=all, or those for CI."""
    if os.environ.get("AUTOAC_ZOO") != "all":
        return ["Llama, bf16", "Mixtral, bf16", "ResNet, fp32", "T5, fp32"]
    from benchmarks.models.tiny import ZOO

    return [f"{entry.name}, {dtype}" for entry in ZOO for dtype in ("fp32", "bf16")]


TASKS = {
    "GPT-2": lambda: of_zoo("GPT-2"),  # with its dropout of 0.1
    "convnet": lambda: of_zoo("U-Net"),  # batch norms, in-place activations, long skips
    "LSTM": lambda: of_zoo("LSTM"),  # with dropout between its layers
    "cuda:1": lambda: Task(LanguageModel, ids, device="cuda:1"),
    "bf16 autocast": lambda: Task(LanguageModel, ids, context=in_bf16),
    "two streams": lambda: Task(SideStream, lambda: {"x": torch.randn(16, 32, 32)}),
    "several backwards": lambda: Task(lambda: WithLoss(SeveralBackwards), rows),
    "equilibrium": lambda: Task(lambda: WithLoss(Equilibrium), rows),
    **{name: functools.partial(of_zoo, name) for name in zoo()},
}


@functools.cache
def smallest_of(name: str) -> int:
    """Return a peak near the smallest."""
    return find_minimum_peak(profile_of(name), gap=0.3, work_limit=1.0).found


@functools.cache
def task_of(name: str) -> Task:
    return TASKS[name]()


@functools.cache
def profile_of(name: str) -> Profile:
    return task_of(name).observed()


@functools.cache
def bounds_of(name: str) -> Bounds:
    return bounds(build(profile_of(name)))
