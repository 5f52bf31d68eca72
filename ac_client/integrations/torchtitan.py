"""Plan the model of a torchtitan Trainer: one line around its config.

    def llama3_8b_planned() -> Trainer.Config:
        return planned(llama3_8b(), budget_gb=70)

torchtitan calls a hook once the optimizers are built; the budget is applied there, after the hook of the
model, if it has one. torchtitan is not imported: a config is a dataclass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar, Unpack

from torch import nn

import ac_client
from ac_client.integrations.options import ApplyArguments
from ac_client.planning.facts.optimizer_steps import steps
from ac_client.planning.options import Budget

Config = TypeVar("Config")


def planned(config: Config, budget_gb: Budget = None, **options: Unpack[ApplyArguments]) -> Config:
    """Return `config` with a budget for the model, in place of activation checkpointing.

    CUDA graphs are switched off: torchtitan captures the second step, which is the first that has a plan.

    Args:
        config: a `torchtitan.trainer.Trainer.Config`, which stays as it is.
        budget_gb, options: as for `ac_client.apply`. The optimizers are torchtitan's.

    Raises:
        TypeError: `config` is not that of a Trainer with a model.
    """
    made: Any = config
    spec: Any = getattr(made, "model_spec", None)
    if not hasattr(spec, "post_optimizer_build_fn") or not hasattr(made, "activation_checkpoint"):
        raise TypeError(
            "config must be a torchtitan Trainer.Config with a model_spec, got a "
            f"{type(config).__name__}; torchtitan 0.3 and later have it"
        )
    before = spec.post_optimizer_build_fn

    def built(optimizers: Any, parts: Sequence[nn.Module], *dims: Any) -> None:
        if before is not None:
            before(optimizers, parts, *dims)
        for part in parts:
            several = getattr(optimizers, "optimizers", (optimizers,))  # a container of torchtitan's
            options["optimizer"] = [one for one in several if steps(one, part)]
            ac_client.apply(part, budget_gb, **options)

    changes: dict[str, Any] = {
        "model_spec": dataclasses.replace(spec, post_optimizer_build_fn=built),
        "activation_checkpoint": None,
    }
    if hasattr(made.training, "disable_cuda_graphs"):
        changes["training"] = dataclasses.replace(made.training, disable_cuda_graphs=True)
    replaced: Config = dataclasses.replace(made, **changes)
    return replaced
