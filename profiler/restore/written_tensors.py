"""Restore the user's tensors that a profiled step writes, before each of its forwards and at its end.

A forward may write over its inputs (`ids[ids < 0] = 0`), over parameters (the teacher of MoCo and BYOL,
weights normalized in place), or over what the model keeps elsewhere: a teacher in a list, averages in an
object, a memory bank in a dictionary. So the contents of such a tensor are copied before the first op that
writes it.

Only tensors of the batch and of the model are restored; all others are fake in a step that puts them back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoac.profiler.torch_facts.op_facts import OpFacts, written_tensors
from autoac.profiler.torch_facts.private import disable_current_modes, tree_leaves
from autoac.profiler.torch_facts.storage_table import has_storage


class Originals:
    """The contents that written tensors had before the step."""

    def __init__(self) -> None:
        self._shared: dict[int, list[Tensor]] = {}  # the user's tensors, not written so far, by storage
        self._written: list[tuple[Tensor, Tensor]] = []  # the user's tensors that were written, with copies

    def share(self, tensor: Tensor, alias: Tensor) -> bool:
        """Watch the user's `tensor`, which `alias` replaces. Return False if they share no memory."""
        if not (has_storage(tensor) and has_storage(alias)):
            return False
        storage = alias.untyped_storage()
        if storage._cdata != tensor.untyped_storage()._cdata:
            return False
        if tensor.is_inference():
            return False
        self._shared.setdefault(storage._cdata, []).append(tensor.detach())
        return True

    def keep(self, facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Copy what an op may write, before it runs."""
        if not facts.mutates:
            return
        # The writes of a higher-order op are known only afterwards.
        written = tree_leaves((args, kwargs)) if facts.opaque else written_tensors(facts, args, kwargs)
        for tensor in written:
            if isinstance(tensor, Tensor) and has_storage(tensor):
                self.keep_storage(tensor)

    def keep_storage(self, tensor: Tensor) -> None:
        """Copy the storage of `tensor`, before it is written."""
        storage = tensor.untyped_storage()
        shared = self._shared.pop(storage._cdata, None)
        if shared is not None:
            self._written += [(tensor, tensor.clone()) for tensor in shared]

    def restore(self) -> None:
        """Copy the contents back."""
        with disable_current_modes(), torch.no_grad():
            for tensor, contents in self._written:
                tensor.copy_(contents)
