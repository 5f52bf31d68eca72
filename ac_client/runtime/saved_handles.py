"""What autograd holds in place of a tensor, from the pack hook to the unpack hook."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ac_client.runtime.nodes import Value, add_use, take_use
from ac_client.runtime.replay import Graph, homes, realize, shown, suspended
from ac_client.runtime.split_backward import leaves_gradients
from ac_client.runtime.view_recipes import Guard, Recipe, without_history


class Packed:
    """What autograd holds in place of a tensor that can be made again."""

    __slots__ = ("__weakref__", "_last", "_pass", "_task", "_value", "device", "graph", "key", "recipe")

    def __init__(self, value: Value, recipe: Recipe, graph: Graph, device: torch.device) -> None:
        self._value = value
        self.recipe = recipe
        self.graph = graph
        self.device = device
        self.key = graph.home.number(self)
        self._task = -1  # the last graph task in which it was unpacked
        self._pass = -1  # the last pass in which it was used up
        self._last: weakref.ref[Tensor] | None = None
        value.packs.append(graph.home[-1])
        # Without the lock, which would cost as much as the count: see `add_use`.
        if value.uses:
            value.uses += 1
        else:
            add_use(value)

    def unpack(self) -> Tensor:
        """The tensor, made again if need be.

        Raises:
            StaleError: what it is made from was written since.
        """
        with self.graph.lock:
            running, uses_up = self.graph.current_pass()
            if self._task == running.task and self._last is not None and (last := self._last()) is not None:
                return last
            if running.split is not None and self._pass == running.first and self._task != running.task:
                running = self.graph.afresh()
            value = self._value
            made = running.cache.get(value.serial)
            if made is None:
                made = realize(value, running, self.graph)
            elif running.given_out:
                running.check(value, "backward")
            tensor = shown(value, made, self.recipe)
            if uses_up:
                if self._pass != running.first and not (running.split is not None and leaves_gradients()):
                    running.use(value)
                    running.give_out(value, tensor)
                    self._pass = running.first
                self._task = running.task
                self._last = weakref.ref(tensor)
            return tensor

    def move(self, newer: Value) -> None:
        """Be made from `newer`, a later version that is the same wherever this tensor shows it."""
        with self.graph.lock:
            add_use(newer)
            take_use(self._value)
            self._value = newer

    def unpack_own(self) -> Tensor:
        """The tensor, a copy of it if it is needed elsewhere: compiled code may write over what it gets."""
        with self.graph.lock:
            tensor = self.unpack()
            self._last = None
            running, _ = self.graph.current_pass()
            return tensor.clone() if self._value.serial in running.cache else tensor

    def __del__(self) -> None:
        graph, value = self.graph, self._value
        with graph.lock:
            for ref in graph.passes.valuerefs():
                running = ref()
                if running is not None and running.first != self._pass:
                    running.lose(value)
            take_use(value)


class Kept(Guard):
    """What autograd holds in place of a tensor that stays as it is."""

    __slots__ = ("__weakref__", "_home", "key")

    def __init__(self, tensor: Tensor, graph: Graph) -> None:
        if tensor.grad_fn is not None or tensor._base is not None:
            tensor = without_history(tensor)
        Guard.__init__(self, tensor)
        self._home = graph.home
        self.key = self._home.number(self)

    def unpack(self) -> Tensor:
        """The tensor.

        Raises:
            StaleError: it was written since.
        """
        self.check("backward")
        return self.tensor

    def unpack_own(self) -> Tensor:
        """A copy of the tensor, which compiled code may write over."""
        return self.unpack().clone()


class HandedOn:
    """What autograd holds in place of a tensor that stays as it is, where hooks are around the region.

    They see it as they would without us, so that they can move it to the host.
    """

    __slots__ = ("_unpack", "packed")

    def __init__(
        self, tensor: Tensor, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> None:
        self._unpack = unpack
        suspended.depth += 1
        try:
            self.packed = pack(without_history(tensor) if tensor.grad_fn is not None else tensor)
        finally:
            suspended.depth -= 1

    def unpack(self) -> Tensor:
        """The tensor, from the hooks that have it."""
        return self._unpack(self.packed)


# NOTE [ Compiled autograd ]
#
# Compiled autograd traces the unpack hook. What Dynamo sees of it must be one opaque call: traced through,
# all that a replay makes would become outputs of the graph, and a hook that it may not trace would break
# the graph at every unpack. So the call takes plain data only: a key, and what a fake tensor needs.
@torch.library.custom_op(
    "ac_client::unpack",
    mutates_args=(),
    schema="(SymInt key, SymInt[] size, SymInt[] stride, ScalarType dtype, Device device) -> Tensor",
)
def _opaque(key: int, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    packed = homes[key >> 32][key & 0xFFFFFFFF]()
    assert packed is not None
    own: Tensor = packed.unpack_own()
    return own.resolve_conj().resolve_neg()


@_opaque.register_fake
def _(key: int, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def unpack(packed: Any) -> Tensor:
    """The unpack hook."""
    kind = type(packed)
    if (kind is Packed or kind is Kept) and torch.compiler.is_dynamo_compiling():
        if kind is Packed:
            dtype, size, stride = packed.recipe[:3]
            device = packed.device
        else:
            kept = packed.tensor
            dtype, size, stride, device = kept.dtype, kept.size(), kept.stride(), kept.device
        return _opaque(packed.key, size, stride, dtype, device)  # type: ignore[no-any-return]
    if isinstance(packed, Tensor):
        return packed
    tensor: Tensor = packed.unpack()
    return tensor
