"""Plan a model in a plain loop, for as long as a with-block runs.

with planned(model, budget_gb=40, optimizer=optimizer) as at:
    for batch in loader:
        ...
print(at.report())
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Unpack

from torch import nn

from ac_client import Applied, applied, apply
from ac_client.integrations.options import ApplyArguments
from ac_client.planning.options import Budget


@contextmanager
def planned(
    model: nn.Module, budget_gb: Budget = None, **options: Unpack[ApplyArguments]
) -> Iterator[Applied]:
    """Apply a budget for a with-block, and remove it however the block ends.

    Args:
        model, budget_gb, options: as for `ac_client.apply`.

    Yields:
        The model's `Applied`. Its report can be read after the block too.

    Raises:
        ValueError, TypeError: as `ac_client.apply`.
    """
    apply(model, budget_gb, **options)
    at = applied(model)
    try:
        yield at
    finally:
        at.remove()
