"""Detect in-place writes to a storage that happen after forward, by torch's version counters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.nn import Parameter

from autoac.planner.errors import PickledError
from autoac.tape.distributed.process_groups import note_mesh
from autoac.tape.distributed.wrapped_tensors import below, wraps_others
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.storage_table import StorageTable, has_storage, is_wrapper
from autoac.tape.unseen.held_storages import recorded


class StaleError(RuntimeError):
    """Raised in backward if a tensor that it needs was written in place after forward recorded it."""


class ContentsDiffer(PickledError, RuntimeError):
    """Raised in backward if a recomputed tensor does not have the contents that it had in forward.

    Backward compares in the first step and where `verify` asks for it, and has not used the tensor. `op` is
    empty for a tensor that autograd saved in a checkpoint: NOTE [ Needed checkpoints ] in own_checkpoints.py.
    """

    def __init__(self, op: str, module: str, tensor: str) -> None:
        self.op, self.module, self.tensor = op, module, tensor
        where = f" of the module {module}" if module else ""
        pin = f'ac_client.pin(model.get_submodule("{module}"), "must_save")' if module else "ac_client.pin"
        if not op:
            super().__init__(
                f"a {tensor} that autograd saved inside of a checkpoint must have in backward the contents "
                "that it had in forward, got others: the model wrote to it after the checkpoint, as to a "
                "buffer that several parts share. Use torch.utils.checkpoint for these parts, with "
                "Constraints(take_over_checkpoints=False) in a planned model, or give each its own memory"
            )
            return
        super().__init__(
            f"{op}{where} must make in backward what it made in forward, a {tensor}, got other contents. "
            "Either something wrote to it or to what it reads that no op shows (a kernel that PyTorch does "
            "not dispatch, a write through another tensor's .data), or the op is not deterministic. Save it, "
            f"with {pin} before the step. If it is in a checkpoint, Constraints(take_over_checkpoints=False) "
            "leaves that to torch"
        )


class WrapperWrites:
    """Count the writes to a storage through tensors that wrap it, such as DTensors.

    A write to a wrapper advances the counter of the wrapper, and of no tensor inside.
    """

    def __init__(self) -> None:
        self._past = 0  # writes through wrappers that are gone
        # With an alias, and its first count.
        self._wrappers: list[tuple[weakref.ref[Tensor], Tensor, int]] = []

    def add(self, wrapper: Tensor) -> None:
        """Count the writes through `wrapper` and its views from here on."""
        base = wrapper._base if wrapper._base is not None else wrapper  # they share a counter
        live = []
        for ref, alias, first in self._wrappers:
            known = ref()
            if known is base:
                return
            if known is not None:
                live.append((ref, alias, first))
            else:
                self._past += alias._version - first
        unseen = private.DisableTorchDispatch()  # the alias has the counter of the wrapper, and no memory
        with private.SetExcludeDispatchKeyGuard(_COUNTS_VERSIONS, False):
            alias = base.detach()
        del unseen
        self._wrappers = [*live, (weakref.ref(base), alias, alias._version)]

    def count(self) -> int:
        """Return the number of writes."""
        return self._past + sum(alias._version - first for _, alias, first in self._wrappers)


_wrapper_writes: StorageTable[WrapperWrites] = StorageTable()


def note_wrappers(tensors: Iterable[Tensor]) -> None:
    """Have `version_counter` of what wrappers among `tensors` wrap include the writes to these wrappers.

    Note the groups over which they are distributed, too.
    """
    for tensor in filter(lambda tensor: wraps_others(type(tensor)), tensors):
        note_mesh(tensor)
        if not tensor.is_inference():  # which counts no writes
            for inner in filter(has_storage, below(tensor)):
                writes = _wrapper_writes.get(inner)
                if writes is None:
                    _wrapper_writes.set(inner, writes := WrapperWrites())
                writes.add(tensor)


def version_counter(tensor: Tensor) -> int:
    """Return the version counter of `tensor`, or -1 if it has none because it is an inference tensor.

    Add the writes through wrappers of its storage: `note_wrappers`.
    """
    try:
        counter = tensor._version
    except RuntimeError:
        return -1
    if _wrapper_writes.refs and has_storage(tensor) and (writes := _wrapper_writes.get(tensor)) is not None:
        counter += writes.count()
    return counter


def detached_alias(tensor: Tensor) -> Tensor:
    """Detach `tensor` out of sight of dispatch modes; the result shares its version counter."""
    kind = type(tensor)
    # Inside a dispatch mode the key that shares the version counter is excluded.
    excluded = private.dispatch_key_is_excluded(_COUNTS_VERSIONS)
    if excluded:
        private.set_dispatch_key_excluded(_COUNTS_VERSIONS, False)
    try:
        if kind is Tensor or kind is Parameter:
            return private.make_subclass(Tensor, tensor)
        if is_wrapper(tensor):
            return tensor.detach()  # only the dispatch of the subclass can detach it
        return private.make_subclass(Tensor if issubclass(kind, Parameter) else kind, tensor)
    finally:
        if excluded:
            private.set_dispatch_key_excluded(_COUNTS_VERSIONS, True)


_COUNTS_VERSIONS = private.DispatchKey.ADInplaceOrView


def held_alias(tensor: Tensor, *, saved: bool = False) -> Tensor:
    """Return the `detached_alias` of `tensor` by which a region holds its storage.

    Args:
        saved: the region holds the storage in place of autograd.
    """
    alias = detached_alias(tensor)
    if recorded.held is not None:
        recorded.held.note(alias, saved=saved)
    return alias


def check_counter(tensor: Tensor, expected: int, reader: str) -> None:
    """Check that the `version_counter` of `tensor` is as `expected`.

    Raises:
        StaleError: the tensor was written; the message names `reader`, the op that needs it.
    """
    if (counter := version_counter(tensor)) != expected:
        raise StaleError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.dtype} {list(tensor.shape)}], which {reader} reads in forward and again in backward, "
            f"is at version {counter}; expected version {expected} instead, as in forward. "
            "Write to the tensor after backward, or write to a clone() of the tensor"
        )
