"""Other ways to recompute in training: each is a function that changes a model and returns it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autoac.planner import Profile, build
from autoac.planner.formats.op_key import OpKey
from benchmarks.plans.knapsacks import block_policy
from benchmarks.torch_checkpoint import wrap_blocks

SHARE = 0.5  # of a block's bytes, or of all, for the ways that take one

Prepare = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True, slots=True)
class TrainingCase:
    """A model, its batch and its blocks."""

    name: str
    make: Callable[[], tuple[nn.Module, dict[str, Any]]]
    blocks: Callable[[nn.Module], list[nn.Module]]


def ways(case: TrainingCase, taken: Profile) -> dict[str, Prepare]:
    """Return the other ways to recompute, each as a function that changes a model and returns it."""

    def wrapped(baseline: Any, model: nn.Module) -> nn.Module:
        wrap_blocks(case.blocks(model), baseline)
        return model

    return {
        "checkpoint": partial(wrapped, "checkpoint"),
        "selective": partial(wrapped, "selective"),
        "xformers-style": partial(_xformers_style, case, taken),
        "activation_memory_budget": _memory_budget,
    }


def _xformers_style(case: TrainingCase, taken: Profile, model: nn.Module) -> nn.Module:
    """Wrap each block in selective checkpoint, with the policy that torch's program per module finds."""
    graph = build(taken)
    paths = {module: path for path, module in model.named_modules()}
    for block in case.blocks(model):
        path = paths[block]
        ops = [op for op in graph.ops if f"{OpKey.parse(op.name).module}.".startswith(f"{path}.")]
        saves: dict[str, list[bool]] = {}
        for op, save in zip(ops, block_policy(graph, [op.id for op in ops], SHARE), strict=True):
            saves.setdefault(OpKey.parse(op.name).op, []).append(save)
        contexts = partial(create_selective_checkpoint_contexts, allow_cache_entry_mutation=True)
        options: Any = {"use_reentrant": False, "context_fn": _Counted(contexts, saves)}
        block.forward = partial(checkpoint, block.forward, **options)
    return model


@dataclass(frozen=True, slots=True)
class _Counted:
    """Make the contexts of one call of a block; its policy counts how often each op ran in the call."""

    contexts: Callable[[Any], Any]
    saves: dict[str, list[bool]]  # by op: whether its first, second, ... call is saved

    def __call__(self) -> Any:
        seen: dict[tuple[bool, str], int] = {}

        def policy(context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
            key = context.is_recompute, str(op)
            seen[key] = position = seen.get(key, -1) + 1
            saves = self.saves.get(str(op), [])
            save = position < len(saves) and saves[position]
            return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

        return self.contexts(policy)


def _memory_budget(model: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(model, backend="aot_eager")

    def call(**batch: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=SHARE):
            return compiled(**batch)

    module = nn.Module()
    module.forward = call
    return module
