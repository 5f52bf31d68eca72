"""Run the checkpoints of a model's own code as plain calls, so that a plan decides what is recomputed.

`torch.utils.checkpoint.checkpoint` is imported by name into many libraries, so replacing it would not reach
them. All its callers reach two names that it looks up in its module when it is called: a generator around
the function (`use_reentrant=False`), and an autograd Function that calls it (`use_reentrant=True`). While a
`plain_checkpoints` is open, both names lead to functions of this file, which call torch's outside of the
threads that opened one. torch.compile knows `checkpoint` itself and looks up neither.

Calls that cannot run plainly go to torch and are noted: those with `debug`, or with contexts other than those
of selective checkpoints, which do more than recompute. Saved-tensor hooks that a model enters, such as
`save_on_cpu`, are noted as well.

NOTE [ Needed checkpoints ]
Some models need their checkpoints for more than memory: parts of the model write to memory that they share,
such as one buffer for the weights of all layers. The function of a checkpoint fills the memory again in
backward. A plain call would leave its saved tensors with what a later part has written. So the profiler
notes the storages that autograd saves in each plain call (`running_call`). If they are written later, it
profiles again with all checkpoints of the model left to torch. An observed step keeps the contents before
such a write, leaves further calls to torch (`need_checkpoints`), and the next step is observed in its place.
Without such a profile, the first planned step compares the contents of these tensors, and backward raises an
error.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint as torchs
from torch import Tensor

from autoac.tape.torch_facts import private

UNPLANNED = "not planned: "
"""How the message on something that could not be taken over begins."""


def _message(what: str, next_move: str) -> str:
    return (
        f"{UNPLANNED}{what}, used inside the model, decides what autograd holds, so no plan frees these "
        f"tensors. To have them planned, {next_move}"
    )


NEEDED = _message(
    "torch.utils.checkpoint around parts that write to memory that they share",
    "give each part memory of its own",
)
"""The message on checkpoints that a model needs: NOTE [ Needed checkpoints ]."""

R = TypeVar("R")

_CONTEXTS_OF_REMAT = "torch_remat"  # mark what its checkpoint recomputes; without them it runs plainly

_OWN_PACKAGES = ("ac_client", "autoac")


class _ThreadCalls(threading.local):
    depth = 0  # of nested `plain_checkpoints`
    left_alone = 0  # of nested `checkpoints_left_alone`
    needed = 0  # those of them in which the model needs its checkpoints
    found_needed = False  # it was found to need them in a `plain_checkpoints`
    call = 0  # number of the innermost plain call that runs; 0: none
    unplanned: dict[str, None] | None = None  # messages on what could not be taken over


_thread = _ThreadCalls()
_lock = threading.Lock()
_numbers = itertools.count(1)
_open = 0  # `plain_checkpoints` on all threads
_replaced: list[tuple[Any, str, Any]] = []  # owner, name and original of what is replaced now


def context_of_forward(out: Any) -> torchs.SelectiveCheckpointContext:
    """Return what torch passes to the policy of a selective checkpoint in forward, after an op made `out`."""
    context = torchs.SelectiveCheckpointContext(is_recompute=False)
    if hasattr(context, "op_output"):  # since torch 2.12
        context.op_output = out
    return context


def checkpoints_are_plain() -> bool:
    """Return True if checkpoints run as plain calls on this thread now."""
    left_to_torch = _thread.left_alone or _thread.found_needed
    return _thread.depth > 0 and not left_to_torch and not torch.compiler.is_compiling()


def checkpoints_are_needed() -> bool:
    """Return True if the model that runs on this thread needs its checkpoints."""
    return _thread.needed > 0 or _thread.found_needed


def need_checkpoints() -> None:
    """Leave checkpoints to torch until the innermost `plain_checkpoints` ends: the model needs them."""
    _thread.found_needed = _thread.depth > 0


def running_call() -> int:
    """Return the number of the innermost checkpoint that runs as a plain call; 0 if there is none."""
    return _thread.call


class plain_checkpoints:
    """Run checkpoints inside the body as plain calls, on this thread.

    Args:
        unplanned: gets a message for each thing in the body that a plan cannot take over.
    """

    def __init__(self, unplanned: dict[str, None] | None = None) -> None:
        self._unplanned = unplanned

    def __enter__(self) -> None:
        global _open
        self._entered = not _thread.left_alone
        if not self._entered:
            return
        with _lock:
            if _open == 0:
                _replace()
            _open += 1
        _thread.depth += 1
        self._before = _thread.unplanned, _thread.call, _thread.found_needed
        _thread.unplanned = self._unplanned

    def __exit__(self, *_: Any) -> None:
        global _open
        if not self._entered:
            return
        _thread.depth -= 1
        _thread.unplanned, _thread.call, _thread.found_needed = self._before
        with _lock:
            _open -= 1
            if _open == 0:
                for owner, name, original in _replaced:
                    setattr(owner, name, original)
                _replaced.clear()


class checkpoints_left_alone:
    """Leave checkpoints to torch inside the body, on this thread, also inside `plain_checkpoints`.

    Args:
        needed: the model needs them, so those of `ac_client` go to torch, too.
    """

    def __init__(self, *, needed: bool = False) -> None:
        self._needed = needed

    def __enter__(self) -> None:
        _thread.left_alone += 1
        _thread.needed += self._needed

    def __exit__(self, *_: Any) -> None:
        _thread.left_alone -= 1
        _thread.needed -= self._needed


def _replace() -> None:
    generator = private.checkpoint_generator.__name__
    names: list[tuple[Any, str, Any]] = [
        (torchs, generator, _checkpoint_generator),
        (torchs, "CheckpointFunction", _CheckpointFunction),
        (torch.autograd.graph.saved_tensors_hooks, "__enter__", _enter_hooks),
    ]
    composable = sys.modules.get(private.COMPOSABLE_CHECKPOINT)
    if isinstance(composable, ModuleType) and hasattr(composable, generator):  # imports it by name
        names.append((composable, generator, _checkpoint_generator))
    for owner, name, replacement in names:
        _replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)


_enter: Callable[..., None] = torch.autograd.graph.saved_tensors_hooks.__enter__
_function: Any = torchs.CheckpointFunction


def _checkpoint_generator(*args: Any, **kwargs: Any) -> Generator[None]:
    """Return the generator around a checkpointed call. Its arguments differ between releases of torch."""
    generator: Callable[..., Generator[None]] = private.checkpoint_generator
    if not checkpoints_are_plain():
        return generator(*args, **kwargs)
    call = inspect.signature(generator).bind(*args, **kwargs)
    call.apply_defaults()
    context_fn = call.arguments["context_fn"]
    if private.checkpoint_debugs(call.arguments["debug"]):
        _note("torch.utils.checkpoint with debug=True", "leave debug=True out")
    elif (getattr(context_fn, "__module__", None) or "").partition(".")[0] == _CONTEXTS_OF_REMAT:
        return _plain_call()
    else:
        contexts = context_fn()
        if type(contexts[0]) is contextlib.nullcontext or _is_selective(contexts[0]):
            return _plain_call()  # the other one is for backward
        call.arguments["context_fn"] = functools.partial(tuple, contexts)
        _note(
            "torch.utils.checkpoint with a context_fn other than that of selective checkpoints",
            "leave context_fn out",
        )
    if call.arguments.get("respect_saved_tensors_hooks", False) is None:  # since torch 2.14, which warns
        call.arguments["respect_saved_tensors_hooks"] = False
    return _left_to_torch(generator(*call.args, **call.kwargs))


def _is_selective(context: Any) -> bool:
    """Return True if all that `context` does is to save what a policy says: a plan decides that instead."""
    return isinstance(context, private.TorchDispatchMode) and type(context).__module__ == torchs.__name__


def _plain_call() -> Generator[None]:
    # No `finally`: after an exception in the call, Python ends this generator at any later time.
    outer, _thread.call = _thread.call, next(_numbers)
    yield
    _thread.call = outer


def call_plainly(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Call the function of a checkpoint."""
    call = _plain_call()
    next(call)
    out = function(*args, **kwargs)
    next(call, None)
    return out


def _left_to_torch(generator: Generator[None]) -> Generator[None]:
    # Backward runs the function again, with all checkpoints inside. So must forward.
    with checkpoints_left_alone():
        yield from generator


class _CheckpointFunction(_function):  # type: ignore[misc]
    """Call the function of a reentrant checkpoint plainly."""

    @classmethod
    def apply(cls, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if not checkpoints_are_plain():
            return _function.apply(function, preserve_rng_state, *args)
        if any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            return call_plainly(function, *args)
        torchs.check_backward_validity(args)  # warns: torch gives such a call no gradient at all
        with torch.no_grad():
            return function(*args)


def _enter_hooks(hooks: Any) -> None:
    """Enter saved-tensor hooks, and note those of the model."""
    if _thread.unplanned is not None:
        kind = type(hooks)
        module = kind.__module__ if kind is not torch.autograd.graph.saved_tensors_hooks else None
        module = module or getattr(hooks.pack_hook, "__module__", None) or ""
        if module.partition(".")[0] not in _OWN_PACKAGES and module != torchs.__name__:
            whose = f" of {module}" if kind.__name__ == "saved_tensors_hooks" else ""
            _note(f"{kind.__name__}{whose}", "leave it out: the plan recomputes what it must")
    _enter(hooks)


def _note(what: str, next_move: str) -> None:
    if _thread.unplanned is not None:
        _thread.unplanned[_message(what, next_move)] = None
