"""What people do today: `torch.utils.checkpoint` around every block, whole and selective.

`wrap_blocks` does it, `replayed_ops` says which ops it runs again, from a profile of the plain model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # the parent process needs no torch
    from torch import nn

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
"""Matmuls and attention. With dropout torch splits attention on CPU into two `bmm` and a softmax."""


def wrap_blocks(
    blocks: Iterable[nn.Module], baseline: Baseline, saved_by_selective: Sequence[str] = SAVED_BY_SELECTIVE
) -> None:
    """Run every block's forward under torch's non-reentrant checkpoint from now on."""
    import torch
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    options: dict[str, Any] = {"use_reentrant": False}
    if baseline == "selective":
        saved = [overload(torch.ops, name) for name in saved_by_selective]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, saved)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, **options)


def overload(ops: Any, name: str) -> Any:
    """The op of that name: `overload(torch.ops, "aten.mm.default")`."""
    for part in name.split("."):
        ops = getattr(ops, part)
    return ops


def replayed_us(
    profile: Profile,
    blocks: Iterable[str],
    baseline: Baseline,
    saved_by_selective: Sequence[str] = SAVED_BY_SELECTIVE,
) -> float:
    """The run time, by the profile, of what `baseline` runs again."""
    replayed = replayed_ops(profile, blocks, baseline, saved_by_selective)
    return sum(profile.ops.runtime_us[op] for op in replayed)


def replayed_ops(
    profile: Profile,
    blocks: Iterable[str],
    baseline: Baseline,
    saved_by_selective: Sequence[str] = SAVED_BY_SELECTIVE,
) -> list[int]:
    """Forward ops that torch's checkpoint around each of `blocks` runs again in backward.

    It starts at the block's first op and stops where the last tensor that backward needs has been
    packed again ("early stop"). A tensor packed after the block's last op counts as the next block's.
    Selective checkpoint runs the same ops but for those whose outputs it has kept.
    """
    modules = [profile.modules[row] for row in profile.ops.module]
    kept = set(saved_by_selective) if baseline == "selective" else set()
    replayed = []
    for block in blocks:
        inside = [op for op, name in enumerate(modules) if name == block or name.startswith(block + ".")]
        if not inside:
            continue
        first, last = inside[0], inside[-1]
        stop = max((packed for packed in profile.saved.packed if first <= packed <= last), default=first)
        replayed += [
            op for op in inside if op < stop and profile.overloads[profile.ops.overload[op]] not in kept
        ]
    return replayed
