"""Define the models that are trained on the stand-in, with their profiles."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoac.planner import Bounds, Profile, bounds, build
from benchmarks.models.modules import Transformer
from standin.training import Task


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


def of_zoo(name: str) -> Task:
    from benchmarks.models.tiny import ZOO

    entry = next(entry for entry in ZOO if entry.name == name)
    return Task(entry.make, entry.batch)


TASKS = {
    "GPT-2": lambda: of_zoo("GPT-2"),  # with its dropout of 0.1
    "convnet": lambda: of_zoo("U-Net"),  # batch norms, in-place activations, long skips
    "LSTM": lambda: of_zoo("LSTM"),  # with dropout between its layers
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
