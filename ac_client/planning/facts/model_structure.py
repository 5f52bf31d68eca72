"""Count changes to modules, so that what depends on their structure is not looked up in each step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from autoac import profiler

_changes = [0]
_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def module_changes(model: nn.Module) -> int:
    """Return a number that rises when a module of `model` gets a part or a parameter, moves or is compiled.

    Modules that a forward makes for itself, such as slices of a ModuleList, do not count.
    """
    if model not in _watched:
        _watch()
        _watched.update(model.modules())
    return _changes[0]


def _note(module: nn.Module, *args: Any) -> None:
    if not torch.compiler.is_compiling() and module in _watched:  # a compiled forward would guard the set
        _changes[0] += 1
        for arg in args:
            if isinstance(arg, nn.Module):
                _watched.update(arg.modules())


@cache
def _watch() -> None:
    register_module_module_registration_hook(_note)
    register_module_parameter_registration_hook(_note)
    for name in ("_apply", "compile"):
        setattr(nn.Module, name, _noted(getattr(nn.Module, name)))


def _noted(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _note(module)
        return method(module, *args, **kwargs)

    return noted


_devices: weakref.WeakKeyDictionary[nn.Module, tuple[int, torch.device, Callable[[], Tensor | None]]] = (
    weakref.WeakKeyDictionary()
)


def device_of(model: nn.Module) -> torch.device:
    """Return the device that the model trains on, looked up again when its modules or first tensor change."""
    changes, device, ref = _devices.get(model, (-1, torch.device("cpu"), lambda: None))
    # A model that has an entry is watched.
    if changes != _changes[0] or (first := ref()) is None or first.device != device:
        device = profiler.device_of(model)
        tensors = [t for t in chain(model.parameters(), model.buffers()) if t.device == device]
        if tensors:
            _devices[model] = module_changes(model), device, weakref.ref(tensors[0])
    return device
