"""The user's tensors that a profiled step may write: each forward finds them as they were.

A step is profiled by several forwards. One may write over its inputs (`ids[ids < 0] = 0`), over its
parameters (a teacher that follows in MoCo and BYOL, weights that are normalized where they are), or over what
the model keeps elsewhere: a teacher in a list, averages in an object, a memory bank in a dictionary. So
before an op writes over such a tensor its numbers are copied, and put back later.

Of the batch and the parameters it is known beforehand where they are. The rest is found in the first forward:
what an op writes that none has made.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from autoac.profiler.torch_facts.op_facts import OpFacts, written_tensors
from autoac.profiler.torch_facts.op_signature import outputs_of, tensors_in
from autoac.profiler.torch_facts.private import disable_current_modes, tree_leaves
from autoac.profiler.torch_facts.storage_table import StorageTable, has_storage


class Originals:
    """What forwards may write and are to find as it was."""

    def __init__(self) -> None:
        self._shared: dict[int, list[Tensor]] = {}  # the user's tensors that could be written, by storage
        self._written: list[tuple[Tensor, Tensor]] = []  # and those that were, with their numbers before
        # Storages that need no copy, being the step's own, have False; others that were written, a _Before.
        self._others: StorageTable[_Before | Literal[False]] = StorageTable()
        self._finding = False

    def share(self, tensor: Tensor, own: Tensor) -> bool:
        """`own` stands in for the user's `tensor`; whether it is on the same memory, and so is watched."""
        if not (has_storage(tensor) and has_storage(own)):
            return False
        storage = own.untyped_storage()
        if storage._cdata != tensor.untyped_storage()._cdata:
            self._others.put(storage, False)
            return False
        if tensor.is_inference():
            return False
        self._shared.setdefault(storage._cdata, []).append(tensor.detach())
        return True

    @contextmanager
    def finding(self) -> Iterator[None]:
        """Find in the forward that runs inside what it writes elsewhere; it must `note` its ops."""
        self._finding = True
        try:
            yield
        finally:
            self._finding = False

    def keep(self, facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An op is about to run: copy the numbers of what it may write."""
        if not facts.mutates:
            return
        # What a higher-order op writes is known only afterwards.
        written = tree_leaves((args, kwargs)) if facts.opaque else written_tensors(facts, args, kwargs)
        for tensor in written:
            if isinstance(tensor, Tensor) and has_storage(tensor):
                self.keep_storage(tensor)

    def keep_storage(self, tensor: Tensor) -> None:
        """The memory of `tensor` is about to be written."""
        storage = tensor.untyped_storage()
        shared = self._shared.pop(storage._cdata, None)
        if shared is not None:
            self._written += [(tensor, tensor.clone()) for tensor in shared]
            self._others.put(storage, False)
        elif self._finding and self._others.of(storage) is None:
            self._others.put(storage, _Before(weakref.ref(storage), storage.clone()))

    def note(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """An op has run: what it returned on memory of its own was made in this forward."""
        if not self._finding:
            return
        read = {tensor.untyped_storage()._cdata for tensor in tensors_in(args, kwargs) if has_storage(tensor)}
        for tensor in outputs_of(out):
            if has_storage(tensor) and tensor.untyped_storage()._cdata not in read:
                self._others.set(tensor, False)

    def restore(self) -> None:
        """Put back what was written."""
        with disable_current_modes(), torch.no_grad():
            for tensor, numbers in self._written:
                tensor.copy_(numbers)
            for before in self._others.values():
                if before:
                    before.restore()


class _Before(NamedTuple):
    """The bytes of a storage before they were written. Goes with the storage."""

    storage: weakref.ref[torch.UntypedStorage]
    content: torch.UntypedStorage

    def restore(self) -> None:
        storage = self.storage()
        if storage is not None and storage.nbytes() == self.content.nbytes():
            storage.copy_(self.content)
