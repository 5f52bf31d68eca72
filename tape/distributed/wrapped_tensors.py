"""Look below tensors that wrap others, such as DTensors: their own dispatch runs ops on what they wrap.

A region answers an op on wrappers with `NotImplemented`. So the wrapper's own dispatch runs, and the ops on
the tensors inside, collectives among them, reach the region one by one. Autograd saves wrappers; a handle
holds a packed tensor for each tensor inside, and what it takes to wrap it again.

To find out how an op shards its outputs, a DTensor runs it on fake tensors. Those runs are hidden.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.inductor import hidden_from_modes
from autoac.tape.torch_facts.private import disable_current_modes

_kinds: dict[type, bool] = {Tensor: False, nn.Parameter: False}


def wraps_others(kind: type) -> bool:
    """Return True if tensors of this type wrap others, on which their own dispatch runs ops."""
    known = _kinds.get(kind)
    if known is None:
        known = _kinds[kind] = (
            hasattr(kind, "__tensor_flatten__")
            and getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__
            and not kind.__module__.startswith("torch.nested.")  # whose ops know its layout
        )
        if known and sys.modules.get("torch.distributed.tensor") is not None:
            watch_sharding_of_ops()
    return known


def below(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the innermost tensors that `tensor` wraps, or `tensor` itself."""
    if wraps_others(type(tensor)):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            if isinstance(inner := getattr(tensor, name), Tensor):
                yield from below(inner)
    else:
        yield tensor


def with_memory(tensors: Iterable[Any]) -> Iterator[Tensor]:
    """Yield those of `tensors` that have a storage, and in place of a wrapper what it wraps.

    The storage of a wrapper has the size that its shape and dtype say, and no memory. Sparse tensors are left
    out, and so is what is not a tensor.
    """
    for tensor in tensors:
        if hasattr(type(tensor), "__tensor_flatten__"):
            yield from with_memory(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        elif isinstance(tensor, Tensor) and tensor.layout is torch.strided and not private.is_batched(tensor):
            yield tensor


class WrapperHandle:
    """A handle in place of a wrapper that autograd saves.

    Args:
        tensor: the wrapper.
        pack: packs each tensor inside.
        unpack: returns the tensor of what `pack` has returned.
    """

    def __init__(
        self, tensor: Tensor, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> None:
        names, self._context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        self._kind, self._size, self._stride = type(tensor), tensor.size(), tensor.stride()
        inside = {name: getattr(tensor, name) for name in names}
        self._packed = {name: pack(inner) for name, inner in inside.items() if isinstance(inner, Tensor)}
        self._others = {name: inner for name, inner in inside.items() if not isinstance(inner, Tensor)}
        self._unpack = unpack

    def unpack(self) -> Tensor:
        """Return a wrapper of the same kind around the tensors that were packed."""
        inside = {name: self._unpack(packed) for name, packed in self._packed.items()}
        kind: Any = self._kind
        made: Tensor = kind.__tensor_unflatten__(
            {**inside, **self._others}, self._context, self._size, self._stride
        )
        return made.detach()


@functools.cache
def watch_sharding_of_ops() -> None:
    """Hide the runs on fake tensors by which a DTensor finds out how an op shards its outputs."""
    propagator = private.sharding_propagator()
    for name in ("_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached"):
        apart = disable_current_modes()(getattr(propagator, name))  # from the fakes of a fake step
        setattr(propagator, name, hidden_from_modes(apart))
