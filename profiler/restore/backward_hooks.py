"""Silence the user's backward hooks in a profiled step, whose gradients are made up.

Backward of a profiled step runs on ones in place of activations. A hook that checks for NaN would raise on
a healthy model, a hook that logs gradients would log garbage, and anomaly mode would stop the step. So full
backward hooks and pre-hooks of modules, and the hooks that forward sets on tensors and autograd nodes, are
not called. They stay registered with all that they hold, so that tensors live as long as in training.

A backward that the model runs inside its forward calls them: their effect may be part of the result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from autoac.profiler.torch_facts import private

_PARTS_OF_THE_STEP = ("torch.utils.hooks", "torch.distributed.")
"""Modules of torch whose hooks always run: they call a module's own hooks, or belong to FSDP."""


class BackwardHooks:
    """Decides whether backward hooks of the user run in a profiled step."""

    def __init__(self) -> None:
        self.silent = False  # True while no hook is called

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Call no hook in a backward that runs inside."""
        self.silent = True
        try:
            yield
        finally:
            self.silent = False

    def wrap(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that calls `hook` unless the step is silent."""
        return hook if _module_of(hook).startswith(_PARTS_OF_THE_STEP) else _SilenceableHook(hook, self)


class _SilenceableHook:
    """Call a hook unless its step is silent."""

    def __init__(self, hook: Callable[..., Any], step: BackwardHooks) -> None:
        self._hook, self._step = hook, step

    def __call__(self, *args: Any) -> Any:
        return None if self._step.silent else self._hook(*args)


def _module_of(hook: Any) -> str:
    owner = type(hook.__self__) if hasattr(hook, "__self__") else hook
    return getattr(owner, "__module__", None) or ""


class _Thread(threading.local):
    """The profiled step that runs on this thread."""

    hooks: BackwardHooks | None = None


_thread = _Thread()
_lock = threading.Lock()
_running = 0  # profiles, on all threads; torch is patched while there is one


@contextmanager
def backward_hooks(model: nn.Module) -> Iterator[BackwardHooks]:
    """Wrap the hooks of `model`, and those that forwards on this thread set. Anomaly mode is off inside."""
    hooks = BackwardHooks()
    tables: list[dict[int, Any]] = [*private.HOOKS_OF_ALL_MODULES]
    for module in model.modules():
        tables += [module._backward_hooks, module._backward_pre_hooks]
    before = [(table, dict(table)) for table in tables if table]
    for table, content in before:
        table.update({key: hooks.wrap(hook) for key, hook in content.items()})
    outer, _thread.hooks = _thread.hooks, hooks
    try:
        with _registration_patched(), torch.autograd.set_detect_anomaly(False):
            yield hooks
    finally:
        _thread.hooks = outer
        for table, content in before:
            table.clear()
            table.update(content)


@contextmanager
def _registration_patched() -> Iterator[None]:
    """Wrap the hooks that a thread registers while it profiles."""
    global _running
    with _lock:
        _running += 1
        if _running == 1:
            _set_methods(_wrapping)
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if not _running:
                _set_methods(lambda register: register)


_tensor_methods = {
    name: getattr(Tensor, name) for name in ("register_hook", "register_post_accumulate_grad_hook")
}
_node_method = private.HookMixin._register_hook  # torch's C++ calls it for hooks and pre-hooks of nodes


def _set_methods(of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    for name, method in _tensor_methods.items():
        setattr(Tensor, name, of(method))
    private.HookMixin._register_hook = staticmethod(of(_node_method))  # type: ignore[method-assign]


def _wrapping(register: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(register)
    def register_wrapped(target: Any, hook: Callable[..., Any]) -> Any:
        hooks = _thread.hooks
        return register(target, hook if hooks is None else hooks.wrap(hook))

    return register_wrapped
