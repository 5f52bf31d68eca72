"""Plan a model in a loop under accelerate: prepare it first, then plan the model inside.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with planned(accelerator, model, budget_gb=40, optimizer=optimizer) as at:
        for batch in loader:
            with accelerator.accumulate(model):
                ...
                accelerator.log(at.report().metrics(), step=step)

Preparing wraps the forward in autocast and the model in DistributedDataParallel, compiles it, and moves it to
its device; the plan is for the step that then runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Unpack

from torch import nn

from ac_client import Applied
from ac_client.integrations import loop
from ac_client.integrations.errors import MissingLibrary
from ac_client.integrations.options import ApplyArguments
from ac_client.planning.options import Budget

try:
    from accelerate import Accelerator
    from accelerate.utils import is_compiled_module
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    raise MissingLibrary("accelerate", "accelerate") from None


@contextmanager
def planned(
    accelerator: Accelerator, model: nn.Module, budget_gb: Budget = None, **options: Unpack[ApplyArguments]
) -> Iterator[Applied]:
    """Apply a budget to a prepared model for a with-block, and remove it however the block ends.

    Args:
        model: the result of `accelerator.prepare`.
        budget_gb, options: as for `ac_client.apply`. `optimizer` may be the prepared one or the one inside.

    Yields:
        The `Applied` of the model inside. Its report can be read after the block too.

    Raises:
        ValueError, TypeError: as `ac_client.apply`.
    """
    # Of a model with compiled regions, only the copy with the regions is called.
    inner = accelerator.unwrap_model(model, keep_torch_compile=not is_compiled_module(model))
    with loop.planned(inner, budget_gb, **options) as at:
        yield at
