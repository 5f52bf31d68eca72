"""Wrap every block in `torch.utils.checkpoint`, whole and selective."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Baseline = Literal["checkpoint", "selective"]
BASELINES: tuple[Baseline, ...] = ("checkpoint", "selective")

SAVED_BY_SELECTIVE = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.convolution.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
)
"""Products, convolutions and attention, which with dropout is two `bmm` and a softmax on a CPU."""


def wrap_blocks(blocks: Iterable[nn.Module], baseline: Baseline) -> None:
    """Run every block's forward under torch's non-reentrant checkpoint."""
    options: dict[str, Any] = {"use_reentrant": False}
    if baseline == "selective":
        saved = [overload(torch.ops, name) for name in SAVED_BY_SELECTIVE]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, saved)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, **options)


def overload(ops: Any, name: str) -> Any:
    """Return the op of that name: `overload(torch.ops, "aten.mm.default")`."""
    for part in name.split("."):
        ops = getattr(ops, part)
    return ops
