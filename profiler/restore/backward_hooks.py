"""The user's hooks of backward, which a profiled step does not call: its gradients are made up.

Backward of a profiled step runs on ones in place of activations. A hook that checks for NaN would raise on a
healthy model, one that logs gradients would log garbage, and anomaly mode would stop the step. So all of them
are silent in it: full backward hooks and pre-hooks of modules, and the hooks that forward sets on tensors and
autograd nodes. They stay where they are, with all that they hold, so that tensors live as long as in
training.

A backward that the model runs inside of its forward calls them: what they do may be part of the result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from autoac.profiler.torch_facts import private

_OF_TORCH = ("torch.utils.hooks", "torch.distributed.")
"""Code whose hooks are part of the step: modules, which pass on to hooks of their own, and FSDP."""


class BackwardHooks:
    """The hooks of one profiled step.

    Attributes:
        silent: they are not called now.
    """

    def __init__(self) -> None:
        self.silent = False

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Call none of them in a backward that runs inside."""
        self.silent = True
        try:
            yield
        finally:
            self.silent = False

    def quiet(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands in for `hook`."""
        return hook if _module_of(hook).startswith(_OF_TORCH) else _Quiet(hook, self)


class _Quiet:
    """A hook that is not called while its step is silent."""

    def __init__(self, hook: Callable[..., Any], step: BackwardHooks) -> None:
        self._hook, self._step = hook, step

    def __call__(self, *args: Any) -> Any:
        return None if self._step.silent else self._hook(*args)


def _module_of(hook: Any) -> str:
    owner = type(hook.__self__) if hasattr(hook, "__self__") else hook
    return getattr(owner, "__module__", None) or ""


class _Thread(threading.local):
    """State of the profile that runs on this thread."""

    hooks: BackwardHooks | None = None


_thread = _Thread()
_patching = threading.Lock()
_patched = 0  # profiles that are running, on all threads


@contextmanager
def backward_hooks(model: nn.Module) -> Iterator[BackwardHooks]:
    """Take in hand the hooks of `model`, and those that forwards on this thread set. Anomaly mode is off."""
    hooks = BackwardHooks()
    tables: list[dict[int, Any]] = [
        torch_modules._global_backward_hooks,
        torch_modules._global_backward_pre_hooks,
    ]
    for module in model.modules():
        tables += [module._backward_hooks, module._backward_pre_hooks]
    before = [(table, dict(table)) for table in tables if table]
    for table, content in before:
        table.update({key: hooks.quiet(hook) for key, hook in content.items()})
    outer, _thread.hooks = _thread.hooks, hooks
    try:
        with _registration_seen(), torch.autograd.set_detect_anomaly(False):
            yield hooks
    finally:
        _thread.hooks = outer
        for table, content in before:
            table.clear()
            table.update(content)


@contextmanager
def _registration_seen() -> Iterator[None]:
    """Have torch hand over the hooks that a thread sets while it profiles."""
    global _patched
    with _patching:
        _patched += 1
        if _patched == 1:
            _patch()
    try:
        yield
    finally:
        with _patching:
            _patched -= 1
            if not _patched:
                _unpatch()


_tensor_methods = {
    name: getattr(Tensor, name) for name in ("register_hook", "register_post_accumulate_grad_hook")
}
_of_node = private.HookMixin._register_hook  # torch's C++ calls it for hooks and pre-hooks of nodes


def _patch() -> None:
    for name, method in _tensor_methods.items():
        setattr(Tensor, name, _quieting(method))
    private.HookMixin._register_hook = staticmethod(_quieting(_of_node))  # type: ignore[method-assign]


def _unpatch() -> None:
    for name, method in _tensor_methods.items():
        setattr(Tensor, name, method)
    private.HookMixin._register_hook = staticmethod(_of_node)  # type: ignore[method-assign]


def _quieting(register: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(register)
    def registering(where: Any, hook: Callable[..., Any]) -> Any:
        hooks = _thread.hooks
        return register(where, hook if hooks is None else hooks.quiet(hook))

    return registering
