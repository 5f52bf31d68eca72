"""Build batches of fixed numbers, the same at every call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]  # the keyword arguments of one training step
ModelAndBatch = tuple[nn.Module, Batch]


def tokens(batch: int, length: int, vocabulary: int) -> Batch:
    """Return token ids below `vocabulary`, which are also the labels."""
    ids = torch.arange(batch * length).mul(7919).remainder(vocabulary).reshape(batch, length)
    return {"input_ids": ids, "labels": ids}


def images(batch: int, size: int) -> Batch:
    """Return square RGB images of two classes."""
    return {"pixel_values": wave(batch, 3, size, size), "labels": torch.arange(batch).remainder(2)}


def wave(*shape: int) -> Tensor:
    """Return a tensor of numbers in [-1, 1]; it is a view."""
    return torch.linspace(-9, 9, torch.Size(shape).numel()).sin().reshape(shape)
