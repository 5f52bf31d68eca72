"""Follow which module is being called: the first half of an op key."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from types import FrameType
from typing import Any

import torch
from torch import nn

from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.inductor import call_outside_dynamo, is_compiled, is_optimized, keep_dynamo_out

ROOT = "."
"""The path of the model itself, in op keys such as `./aten.add.Tensor#0`."""

_dynamo_callback = private.get_eval_frame_callback


class ModuleHook:
    """A hook that stays with its module: a copy of the module gets a hook that does nothing.

    Dynamo does not trace it: compiled code calls it outside of its graphs.

    Args:
        call: called with the arguments of the hook, or with `path` alone.
        path: of the module.
    """

    def __init__(self, call: Callable[..., Any], path: str | None = None) -> None:
        self.call, self._path = call, path

    def __call__(self, *args: Any) -> None:
        if self._path is not None:
            args = (self._path,)
        # As `dynamo_is_active`, whose call would double the cost.
        if _dynamo_callback():
            call_outside_dynamo(self.call, args)
        else:
            self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return (ModuleHook, (_nothing,))


keep_dynamo_out(ModuleHook.__call__, "the model is planned by ac_client, around its forward")


def _nothing(*_args: Any) -> None:
    return None


class WatchedCompiledCall:
    """Stand in for the compiled call of a module after `module.compile()`, and watch it from outside."""

    def __init__(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._module, self._before, self._after = module, before, after
        self.wrapped: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        try:
            return self.wrapped(*args, **kwargs)
        finally:
            self._after()

    def remove(self) -> None:
        """Put the compiled call back, unless the module was compiled again."""
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self.wrapped


def is_called(model: weakref.ref[nn.Module]) -> bool:
    """Return True if a call of the model is on this thread's stack."""
    called = model()
    return any(f.f_code is _CALL and f.f_locals.get("self") is called for f in frames_from(sys._getframe(1)))


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield `frame` and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


_CALL = nn.Module._call_impl.__code__


def watch_modules(
    model: nn.Module,
    enter: Callable[[str], None],
    leave: Callable[[str], None],
    *,
    wanted: Callable[[str], bool] | None = None,
) -> ExitStack:
    """Call `enter(path)` and `leave(path)` around the forward of each submodule, also when it raises.

    A module with several paths is called by the first one. Submodules of compiled modules are skipped, since
    the compiler would trace the calls; so are those of TorchScript, which takes no hooks.

    Args:
        wanted: returns False for the path of a module that is skipped, too.

    Returns:
        What removes the hooks when it is closed.
    """
    skipped: set[nn.Module] = set()
    with ExitStack() as handles:
        for path, module in model.named_modules():
            if module is model or module in skipped or (wanted is not None and not wanted(path)):
                continue
            if isinstance(module, torch.jit.ScriptModule):
                skipped.update(module.modules())
                continue
            if is_compiled(module):
                skipped.update(module.modules())
                if not is_optimized(module):  # the compiler would trace the hooks
                    watched = WatchedCompiledCall(module, partial(enter, path), partial(leave, path))
                    handles.callback(watched.remove)
                    continue
            before, after = ModuleHook(enter, path), ModuleHook(leave, path)
            handles.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            handles.callback(module.register_forward_hook(after, always_call=True).remove)
        return handles.pop_all()


def is_whole(model: nn.Module, called: Set[str], path: str) -> bool:
    """Return False if the module of `model` at `path` has no submodules, and is inside of one at `called`."""
    around = accumulate(path.split(".")[:-1], "{}.{}".format)
    return called.isdisjoint(around) or bool(model.get_submodule(path)._modules)
