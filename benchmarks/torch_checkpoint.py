"""Wrap every block in `torch.utils.checkpoint`, whole and selective, and predict what it recomputes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from autoac.planner.formats.profile import Profile

Baseline = Literal["checkpoint", "selective"]
BASELINES: tuple[Baseline, ...] = ("checkpoint", "selective")

SAVED_BY_SELECTIVE = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
)
"""Matmuls and attention. With dropout, torch on CPU splits attention into two `bmm` and a softmax."""


def wrap_blocks(
    blocks: Iterable[nn.Module], baseline: Baseline, saved_by_selective: Sequence[str] = SAVED_BY_SELECTIVE
) -> None:
    """Run every block's forward under torch's non-reentrant checkpoint."""
    options: dict[str, Any] = {"use_reentrant": False}
    if baseline == "selective":
        saved = [overload(torch.ops, name) for name in saved_by_selective]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, saved)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, **options)


def overload(ops: Any, name: str) -> Any:
    """Return the op of that name: `overload(torch.ops, "aten.mm.default")`."""
    for part in name.split("."):
        ops = getattr(ops, part)
    return ops


def replayed_us(
    profile: Profile,
    blocks: Iterable[str],
    baseline: Baseline,
    saved_by_selective: Sequence[str] = SAVED_BY_SELECTIVE,
) -> float:
    """Return the run time, by the profile, of the ops that `baseline` recomputes."""
    replayed = replayed_ops(profile, blocks, baseline, saved_by_selective)
    return sum(profile.ops.runtime_us[op] for op in replayed)


def replayed_ops(
    profile: Profile,
    blocks: Iterable[str],
    baseline: Baseline,
    saved_by_selective: Sequence[str] = SAVED_BY_SELECTIVE,
) -> list[int]:
    """Return the forward ops that torch's checkpoint around each of `blocks` recomputes in backward.

    The recompute starts at the block's first op and stops as soon as the last tensor that backward needs is
    packed again ("early stop"). A tensor packed after the block's last op belongs to the next block.
    Selective checkpoint recomputes the same ops except for those whose outputs it saved.
    """
    modules = [profile.modules[row] for row in profile.ops.module]
    saved = set(saved_by_selective) if baseline == "selective" else set()
    replayed = []
    for block in blocks:
        inside = [op for op, name in enumerate(modules) if name == block or name.startswith(block + ".")]
        if not inside:
            continue
        first, last = inside[0], inside[-1]
        stop = max((packed for packed in profile.saved.packed if first <= packed <= last), default=first)
        replayed += [
            op for op in inside if op < stop and profile.overloads[profile.ops.overload[op]] not in saved
        ]
    return replayed
