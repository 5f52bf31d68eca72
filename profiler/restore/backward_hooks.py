"""Silence the user's backward hooks in a profiled step, whose gradients are made up.

Backward of a profiled step runs on ones in place of activations. A hook that checks for NaN would raise on
a healthy model, a hook that logs gradients would log garbage, and anomaly mode would stop the step. So full
backward hooks and pre-hooks of modules, and the hooks that forward sets on tensors and autograd nodes, are
not called. They stay registered with all that they hold, so that tensors live as long as in training.

Hooks are called in two cases, because what they do is a part of the step. One is a backward that the model
runs inside its forward. The other is a hook that differentiates, as deep equilibrium models set on an
activation: its own backward takes time and memory, and makes the gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from autoac.tape.torch_facts import private

_PARTS_OF_THE_STEP = ("torch.utils.hooks", "torch.distributed.")
"""Modules of torch whose hooks always run: they call a module's own hooks, or belong to FSDP."""


_DIFFERENTIATE = frozenset({"grad", "backward", "vjp"})  # names that occur in code that differentiates
_MOST_LOOKED_AT = 1_000  # objects that a hook holds


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
        if self._step.silent and not _differentiates(self._hook):
            return None
        return self._hook(*args)


def _differentiates(hook: Any) -> bool:
    """Return True if `hook` holds a part of the graph, and its code names a function that differentiates."""
    names_one = holds_graph = False
    waiting, seen = [hook], set[int]()
    while waiting and len(seen) < _MOST_LOOKED_AT:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        match item:
            case Tensor():
                holds_graph = holds_graph or item.grad_fn is not None
            case FunctionType():
                waiting += [item.__code__, *(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
                waiting += [content for cell in item.__closure__ or () for content in _content_of(cell)]
            case CodeType():
                names_one = names_one or not _DIFFERENTIATE.isdisjoint(item.co_names)
                waiting += [constant for constant in item.co_consts if isinstance(constant, CodeType)]
            case MethodType():
                waiting += [item.__func__, *getattr(item.__self__, "__dict__", {}).values()]
            case partial():
                waiting += [item.func, *item.args, *item.keywords.values()]
            case list() | tuple():
                waiting += item
            case dict():
                waiting += item.values()
    return names_one and holds_graph


def _content_of(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # the variable is not set yet
        return []


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
