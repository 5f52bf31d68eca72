"""Inductor's compiled code inside a recorded forward: one opaque step, of which only its writes are told.

FSDP's hooks around a module (distributed/fsdp.py) pass as one too, which writes nothing that is planned.

Its kernels write over buffers of which no dispatch mode is told, also over what the ops returned that it
calls by the dispatcher. So recorded one by one those ops would be made again from memory that is something
else by then. And what it writes of its own inputs, only the graph itself knows.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

from torch import Tensor, nn

from autoac.profiler.torch_facts import private
from autoac.profiler.torch_facts.private import TorchDispatchMode, get_current_dispatch_mode_stack

_frames = private.eval_frame


def is_compiled(module: nn.Module) -> bool:
    """Return True if `module.compile()` or `torch.compile(module)` was called on the whole module."""
    return module._compiled_call_impl is not None or is_optimized(module)


def is_optimized(module: nn.Module) -> bool:
    """Return True if `module` is what `torch.compile(other_module)` returned."""
    optimized = private.optimized_module_class()
    return optimized is not None and isinstance(module, optimized)


def compiled_parts(model: nn.Module) -> list[str]:
    """Return the paths of the outermost compiled modules inside `model`."""
    paths: list[str] = []
    for path, module in model.named_modules():
        if is_compiled(module) and not any(path.startswith(f"{outer}.") for outer in paths):
            paths.append(path)
    return paths


def keep_dynamo_out(function: Callable[..., Any], reason: str) -> None:
    """Have Dynamo run `function` as it is, as `torch.compiler.disable(recursive=False)` without its wrapper.

    Unlike that, this imports no Dynamo, and `function` can ask `dynamo_is_active`.

    Args:
        reason: shown to users whose code asks for `fullgraph=True`.
    """
    skip, default = _frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, default))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]


def dynamo_is_active() -> bool:
    """Return True if the calling code runs inside of a function that torch.compile compiles."""
    return bool(_frames.get_eval_frame_callback())


keep_dynamo_out(dynamo_is_active, "it asks for the state of Dynamo itself")


def call_outside_dynamo(call: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Return `call(*args)`, run without Dynamo, also where a compiled function calls this."""
    callback = _frames.set_eval_frame(None)
    try:
        return call(*args)
    finally:
        _frames.set_eval_frame(callback)


keep_dynamo_out(call_outside_dynamo, "it switches Dynamo off")


class RecordingMode(TorchDispatchMode):
    """A mode that is told where compiled code begins and ends."""

    def enter_compiled(self, written: Sequence[Tensor]) -> None:
        """Compiled code runs next, and writes these of its inputs."""
        raise NotImplementedError

    def leave_compiled(self) -> None:
        """It has run, or raised."""
        raise NotImplementedError

    def cross_units(self, tensors: Iterable[Tensor]) -> None:
        """These go into an FSDP unit, or come out of it. See NOTE [ Units ] in distributed/fsdp.py."""
        raise NotImplementedError


def watch_compiled() -> bool:
    """From now on tell the modes; False if nothing can have been compiled in this process so far.

    torch has no hook there. `torch._inductor.config.wrap_inductor_compiled_regions` shows the code as one
    op, but only code that is compiled after it was set, and it does not say what is written.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    graph_class = private.compiled_graph_class()
    if not hasattr(graph_class.__call__, "__wrapped__"):
        graph_class.__call__ = _telling(graph_class.__call__)
    return True


def anything_compiled() -> bool:
    """Whether Inductor's code exists in this process. Slow."""
    graph_class = private.compiled_graph_class()
    return any(type(thing) is graph_class for thing in gc.get_objects())


def _telling(call: Callable[[Any, Sequence[Any]], Any]) -> Callable[[Any, Sequence[Any]], Any]:
    @wraps(call)
    def telling(graph: Any, inputs: Sequence[Any]) -> Any:
        if not recording_modes():
            return call(graph, inputs)
        with opaque_region([inputs[i] for i in graph.mutated_input_idxs if isinstance(inputs[i], Tensor)]):
            return call(graph, inputs)

    return telling


def recording_modes() -> list[RecordingMode]:
    """Those that are active on this thread."""
    return [mode for mode in get_current_dispatch_mode_stack() if isinstance(mode, RecordingMode)]


class opaque_region:
    """What runs inside is not shown to the modes that are recording, except that it writes `written`."""

    __slots__ = ("_modes", "_written")

    def __init__(self, written: Sequence[Tensor]) -> None:
        self._written = written

    def __enter__(self) -> None:
        self._modes = recording_modes()
        for mode in self._modes:
            mode.enter_compiled(self._written)
        del self._written

    def __exit__(self, *_: Any) -> None:
        for mode in self._modes:
            mode.leave_compiled()
