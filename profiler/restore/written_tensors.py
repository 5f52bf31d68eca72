"""Restore the user's tensors that a profiled step writes, before each of its forwards and at its end.

A forward may write over its inputs (`ids[ids < 0] = 0`), over parameters (the teacher of MoCo and BYOL,
weights normalized in place), or over what the model keeps elsewhere: a teacher in a list, averages in an
object, a memory bank in a dictionary. So the contents of such a tensor are copied before the first op that
writes it.

Tensors of the batch and of the model are known in advance. The first forward shows all others: tensors that
an op writes and that no op of that forward made.
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
    """The contents that written tensors had before the step."""

    def __init__(self) -> None:
        self._shared: dict[int, list[Tensor]] = {}  # the user's tensors, not written so far, by storage
        self._written: list[tuple[Tensor, Tensor]] = []  # the user's tensors that were written, with copies
        # Other storages: False for those that belong to the step, else the contents before the first write.
        self._others: StorageTable[_StorageCopy | Literal[False]] = StorageTable()
        self._searching = False

    def share(self, tensor: Tensor, alias: Tensor) -> bool:
        """Watch the user's `tensor`, which `alias` replaces. Return False if they share no memory."""
        if not (has_storage(tensor) and has_storage(alias)):
            return False
        storage = alias.untyped_storage()
        if storage._cdata != tensor.untyped_storage()._cdata:
            self._others.put(storage, False)
            return False
        if tensor.is_inference():
            return False
        self._shared.setdefault(storage._cdata, []).append(tensor.detach())
        return True

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Search the forward that runs inside for writes to other tensors. It must call `note_outputs`."""
        self._searching = True
        try:
            yield
        finally:
            self._searching = False

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
            self._others.put(storage, False)
        elif self._searching and self._others.of(storage) is None:
            self._others.put(storage, _StorageCopy(weakref.ref(storage), storage.clone()))

    def note_outputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note that new storages among the outputs of an op belong to the step."""
        if not self._searching:
            return
        read = {tensor.untyped_storage()._cdata for tensor in tensors_in(args, kwargs) if has_storage(tensor)}
        for tensor in outputs_of(out):
            if has_storage(tensor) and tensor.untyped_storage()._cdata not in read:
                self._others.set(tensor, False)

    def restore(self) -> None:
        """Copy the contents back."""
        with disable_current_modes(), torch.no_grad():
            for tensor, contents in self._written:
                tensor.copy_(contents)
            for copy in self._others.values():
                if copy:
                    copy.restore()


class _StorageCopy(NamedTuple):
    """The bytes of a storage before it was written."""

    storage: weakref.ref[torch.UntypedStorage]
    contents: torch.UntypedStorage

    def restore(self) -> None:
        storage = self.storage()
        if storage is not None and storage.nbytes() == self.contents.nbytes():
            storage.copy_(self.contents)
