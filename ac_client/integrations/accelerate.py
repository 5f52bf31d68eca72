"""A loop under accelerate: prepare first, then plan what is inside of what was prepared.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with planned(accelerator, model, budget_gb=40, optimizer=optimizer) as at:
        for batch in loader:
            with accelerator.accumulate(model):
                ...
                accelerator.log(at.report().metrics(), step=step)

Preparing puts autocast around the forward, the model on its device and DistributedDataParallel around it;
a plan is for what then runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Unpack

import torch
from torch import nn

from ac_client import Applied, CompiledModel
from ac_client.arguments import check_not_compiled
from ac_client.integrations import loop
from ac_client.integrations.errors import MissingLibrary
from ac_client.integrations.options import Options

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    raise MissingLibrary("accelerate", "accelerate") from None

_BY_HAND = (
    "switch dynamo off in accelerate and compile the blocks yourself before prepare, "
    "for block in model.layers: block.compile()"
)


@contextmanager
def planned(
    accelerator: Accelerator,
    model: nn.Module,
    budget_gb: float | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Unpack[Options],
) -> Iterator[Applied]:
    """`ac_client.apply` for a with-block, on a prepared model: however that ends, it is left as it was.

    Args:
        model: what `accelerator.prepare` gave.
        optimizer: the prepared one or the one inside.
        budget_gb, options: as for `ac_client.apply`.

    Yields:
        What was applied to the model inside. Its report can be read after the block too.

    Raises:
        CompiledModel: accelerate compiles it.
        What `ac_client.apply` raises.
    """
    check_not_compiled_by_accelerate("accelerate")
    inner = accelerator.unwrap_model(model)
    check_not_compiled(inner, "leave the torch.compile of the whole model out")
    with loop.planned(inner, budget_gb, optimizer=optimizer, **options) as at:
        yield at


def check_not_compiled_by_accelerate(where: str) -> None:
    """Refuse if accelerate was told, by whatever means, to compile what it prepares.

    Raises:
        CompiledModel.
    """
    from accelerate.state import AcceleratorState
    from accelerate.utils import DynamoBackend

    state = AcceleratorState()
    if state.dynamo_plugin is not None and state.dynamo_plugin.backend != DynamoBackend.NO:
        raise CompiledModel(where, _BY_HAND)
