"""Which module is being called: the first half of an op's name."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import is_not
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from autoac.profiler.compiled import (
    call_outside_dynamo,
    dynamo_is_active,
    is_compiled,
    is_optimized,
    keep_dynamo_out,
)
from autoac.profiler.errors import CannotProfile
from autoac.profiler.ops import has_storage

ROOT = "."
"""The path of the model itself, in op keys such as `./aten.add.Tensor#0`."""


class ModuleHook:
    """A hook that a copy of the module does not take along: it belongs to this one.

    Dynamo does not trace it. A `before` hook, which runs before forward, refuses to be called by compiled
    code in training: a plan's hooks would break the graph at each module, and what runs inside is not seen.
    """

    __slots__ = ("before", "call")

    def __init__(self, call: Callable[..., Any], *, before: bool = False) -> None:
        self.call, self.before = call, before

    def __call__(self, *args: Any) -> Any:
        if not dynamo_is_active():
            return self.call(*args)
        module = args[0]
        if self.before and module.training and torch.is_grad_enabled():
            raise CannotProfile(
                type(module).__name__,
                "it runs inside of torch.compile, where no forward can be planned",
                _COMPILE_BEFORE,
            )
        return call_outside_dynamo(self.call, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return (ModuleHook, (_nothing,))


_COMPILE_BEFORE = (
    "compile blocks of the model, not what is around them, and before ac_client.apply "
    "(`for block in model.layers: block.compile()`), or train the compiled model without a plan"
)
keep_dynamo_out(ModuleHook.__call__, f"the model is planned by ac_client: {_COMPILE_BEFORE}")


def _nothing(*_args: Any) -> None:
    return None


def watch_modules(
    model: nn.Module, enter: Callable[[str], None], leave: Callable[[str], None]
) -> list[RemovableHandle]:
    """Call `enter(path)` and `leave(path)` around the forward of each submodule, also when it raises.

    A module that sits at several paths has the first of them. A compiled module and what is inside of it are
    left to the compiler, which would trace the calls: their ops count as the enclosing module's. Returns the
    handles that undo it.
    """
    handles: list[RemovableHandle] = []
    compiled: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module is model or module in compiled:
            continue
        if is_compiled(module):
            compiled.update(module.modules())
            if not is_optimized(module):  # that one is called as it is, and calls the compiled one
                continue

        def before(_module: nn.Module, _args: Any, path: str = path) -> None:
            enter(path)

        def after(_module: nn.Module, _args: Any, _out: Any, path: str = path) -> None:
            leave(path)

        handles.append(module.register_forward_pre_hook(ModuleHook(before, before=True), prepend=True))
        handles.append(module.register_forward_hook(ModuleHook(after), always_call=True))
    return handles


_ABSENT = object()


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


class ModulesBefore:
    """The attributes of `model` and its submodules as they are now: counters, caches, `training`.

    `restore` puts back what a module assigned, and what is in a list, dictionary or set of its own that it
    changed, as metrics do, at any depth; or in a tensor, or a generator of Python or numpy. Parameters,
    buffers, submodules and hooks that it registered go. What objects of other classes hold stays changed, and
    so does what is in parameters, buffers, and tensors that are in a list or a dictionary.

    Args:
        model: the root.
        copied: what keeps the content of a tensor.
    """

    def __init__(self, model: nn.Module, copied: Callable[[Tensor], Tensor] = _cloned) -> None:
        modules = list(model.modules())
        self._attributes = [(module, dict(module.__dict__)) for module in modules]
        # Torch's own tables of parameters, buffers, submodules and hooks are among them.
        self._contents = [
            restore
            for value in _inside([value for module in modules for value in vars(module).values()])
            if (restore := _keep(value, copied)) is not None
        ]

    def restore(self) -> None:
        """Put them back."""
        for module, attributes in self._attributes:
            now = module.__dict__
            for name in [name for name in now if name not in attributes]:
                del now[name]
            for name, value in attributes.items():
                if now.get(name, _ABSENT) is not value:
                    now[name] = value
        for restore in self._contents:
            restore()


@contextmanager
def modules_restored(model: nn.Module) -> Iterator[None]:
    """Leave the attributes of `model` and its submodules as they were, as `ModulesBefore` does."""
    before = ModulesBefore(model)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def nothing_cached() -> Iterator[None]:
    """Put aside what `torch.nn.utils.parametrize.cached` holds: it is not made of the parameters inside."""
    before = dict(parametrize._cache)
    try:
        yield
    finally:
        forget_cached()
        parametrize._cache.update(before)


def forget_cached() -> None:
    """Have parametrized weights computed anew."""
    parametrize._cache.clear()


def _inside(values: list[Any]) -> Iterator[Any]:
    """`values`, and the containers and generators that are somewhere inside of containers among them."""
    yield from values
    seen = set(map(id, values))
    waiting = list(values)
    while waiting:
        container = waiting.pop()
        kind = type(container)
        if kind not in _CONTAINERS:
            continue
        for item in container.values() if kind in _DICTS else container:
            if id(item) not in seen and type(item) in _KEPT_INSIDE:
                seen.add(id(item))
                waiting.append(item)
                yield item


_DICTS = frozenset({dict, OrderedDict, defaultdict})
_CONTAINERS = _DICTS | {list, deque, set, tuple}
_GENERATORS = frozenset({random.Random, numpy.random.Generator, numpy.random.RandomState})
_KEPT_INSIDE = _CONTAINERS | _GENERATORS


def _keep(value: Any, copied: Callable[[Tensor], Tensor]) -> Callable[[], None] | None:
    """What puts the content of `value` back; None if `value` is not of a kind that has one."""
    kind = type(value)  # a subclass may forbid some of what follows
    if kind in (list, deque):
        return partial(_restore_list, value, list(value))
    if kind in _DICTS:
        return partial(_restore_dict, value, dict(value))
    if kind is set:
        return partial(_restore_set, value, set(value))
    if kind is random.Random:
        return partial(value.setstate, value.getstate())
    if kind is numpy.random.RandomState:
        return partial(value.set_state, value.get_state())
    if kind is numpy.random.Generator:
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, Tensor) and has_storage(value) and not value.is_inference():
        return partial(_restore_tensor, value, copied(value), value._version)
    return None


def _restore_list(value: list[Any] | deque[Any], content: list[Any]) -> None:
    if len(value) != len(content) or any(map(is_not, value, content)):
        value.clear()
        value.extend(content)


def _restore_dict(value: dict[Any, Any], content: dict[Any, Any]) -> None:
    if value.keys() != content.keys() or any(map(is_not, value.values(), content.values())):
        value.clear()
        value.update(content)


def _restore_set(value: set[Any], content: set[Any]) -> None:
    value.intersection_update(content)
    value.update(content)


def _restore_tensor(value: Tensor, content: Tensor, version: int) -> None:
    if value._version != version:
        with torch.no_grad():
            value.copy_(content)
