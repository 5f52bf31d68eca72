"""A plain loop: the model is planned for as long as a with-block runs.

with planned(model, budget_gb=40, optimizer=optimizer) as at:
    for batch in loader:
        ...
print(at.report())
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Unpack

import torch
from torch import nn

from ac_client import Applied, applied, apply
from ac_client.integrations.options import Options


@contextmanager
def planned(
    model: nn.Module,
    budget_gb: float | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Unpack[Options],
) -> Iterator[Applied]:
    """`ac_client.apply` for a with-block: however that ends, the model is left as it was.

    Args:
        model, budget_gb, optimizer, options: as for `ac_client.apply`.

    Yields:
        What `ac_client.applied(model)` gives. Its report can be read after the block too.

    Raises:
        What `ac_client.apply` raises.
    """
    apply(model, budget_gb, optimizer=optimizer, **options)
    at = applied(model)
    try:
        yield at
    finally:
        at.remove()
