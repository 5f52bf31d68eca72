"""Which module is being called: the first half of an op's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

ROOT = "."
"""The path of the model itself, in op keys such as `./aten.add.Tensor#0`."""


class ModuleHook:
    """A hook that a copy of the module does not take along: it belongs to this one."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return (ModuleHook, (_nothing,))


def _nothing(*_args: Any) -> None:
    return None


def watch_modules(
    model: nn.Module, enter: Callable[[str], None], leave: Callable[[str], None]
) -> list[RemovableHandle]:
    """Call `enter(path)` and `leave(path)` around the forward of each submodule, also when it raises.

    A module that sits at several paths has the first of them. Returns the handles that undo it.
    """
    handles: list[RemovableHandle] = []
    for path, module in model.named_modules():
        if module is model:
            continue

        def before(_module: nn.Module, _args: Any, path: str = path) -> None:
            enter(path)

        def after(_module: nn.Module, _args: Any, _out: Any, path: str = path) -> None:
            leave(path)

        handles.append(module.register_forward_pre_hook(ModuleHook(before), prepend=True))
        handles.append(module.register_forward_hook(ModuleHook(after), always_call=True))
    return handles


_KEPT = ("_parameters", "_buffers", "_modules")

_ABSENT = object()


@contextmanager
def modules_restored(model: nn.Module) -> Iterator[None]:
    """Leave the attributes of `model` and its submodules as they were: counters, caches, `training`.

    What a module assigns is put back. What it changes inside a list or a dictionary of its own stays.
    """
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    tables = [(t, dict(t)) for module in model.modules() for name in _KEPT if (t := module.__dict__[name])]
    try:
        yield
    finally:
        for module, attributes in before:
            now = module.__dict__
            for name in [name for name in now if name not in attributes]:
                del now[name]
            for name, value in attributes.items():
                if now.get(name, _ABSENT) is not value:
                    now[name] = value
        for table, content in tables:
            if any(table.get(name, _ABSENT) is not value for name, value in content.items()):
                table.update(content)
