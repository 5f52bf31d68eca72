"""The user's own tensors that a profiled step works on: each forward finds them as they were.

A step is profiled by several forwards. One may write over its inputs (`ids[ids < 0] = 0`) or over its
parameters (a teacher that follows in MoCo and BYOL, weights that are normalized where they are). So before
an op writes over such a tensor its numbers are copied, and put back later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from autoac.profiler.ops import OpFacts, has_storage, written_tensors


class Originals:
    """What forwards may write and are to find as it was."""

    def __init__(self) -> None:
        self._shared: dict[int, list[Tensor]] = {}  # the user's tensors that could be written, by storage
        self._written: list[tuple[Tensor, Tensor]] = []  # and those that were, with their numbers before

    def share(self, tensor: Tensor, own: Tensor) -> bool:
        """`own` stands in for the user's `tensor`; whether it is on the same memory, and so is watched."""
        if not (has_storage(tensor) and has_storage(own)) or tensor.is_inference():
            return False
        address = tensor.untyped_storage()._cdata
        if own.untyped_storage()._cdata != address:
            return False
        self._shared.setdefault(address, []).append(tensor.detach())
        return True

    def keep(self, facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An op is about to run: copy the numbers of what it may write."""
        if not self._shared or not facts.mutates:
            return
        # What a higher-order op writes is known only afterwards.
        written = tree_leaves((args, kwargs)) if facts.opaque else written_tensors(facts, args, kwargs)
        for tensor in written:
            if isinstance(tensor, Tensor) and has_storage(tensor):
                self.keep_storage(tensor)

    def keep_storage(self, tensor: Tensor) -> None:
        """The memory of `tensor` is about to be written."""
        for shared in self._shared.pop(tensor.untyped_storage()._cdata, ()):
            self._written.append((shared, shared.clone()))

    def restore(self) -> None:
        """Put back what was written."""
        if self._written:
            with _disable_current_modes(), torch.no_grad():
                for tensor, before in self._written:
                    tensor.copy_(before)
