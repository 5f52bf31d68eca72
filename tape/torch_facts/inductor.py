"""Hide Inductor's compiled code from the modes that record: one opaque step, of which only its writes are
known.

Inductor's kernels write over buffers that no dispatch mode sees, and over the outputs of ops that Inductor
calls through the dispatcher. If these ops were recorded one by one, a recompute would read memory that was
overwritten since. And only the compiled graph itself knows which of its inputs it writes.

FSDP's hooks around a module (distributed/fsdp.py) are hidden in the same way, and write nothing that is
planned.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from itertools import takewhile
from typing import Any

from torch import Tensor, nn

from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.private import TorchDispatchMode, get_current_dispatch_mode_stack


def is_compiled(module: Any) -> bool:
    """Return True if `module.compile()` or `torch.compile(module)` was called on the whole module."""
    return module._compiled_call_impl is not None or is_optimized(module)


def is_optimized(module: Any) -> bool:
    """Return True if `module` is what `torch.compile(other_module)` returned."""
    optimized = private.optimized_module_class()
    return optimized is not None and isinstance(module, optimized)


def compiled_parts(model: nn.Module) -> list[str]:
    """Return the paths of the outermost compiled modules inside `model`."""
    if "torch._dynamo" not in sys.modules:
        return []
    paths: list[str] = []
    for path, module in model.named_modules():
        if is_compiled(module) and not any(path.startswith(f"{outer}.") for outer in paths):
            paths.append(path)
    return paths


def keep_dynamo_out(function: Callable[..., Any], reason: str, *, recursively: bool = False) -> None:
    """Have Dynamo run `function` as it is, and with `recursively` everything that it calls.

    Unlike `torch.compiler.disable(recursive=False)`, this adds no wrapper and imports no Dynamo, and
    `function` can call `dynamo_is_active`.

    Args:
        function: not compiled.
        reason: shown to users of `fullgraph=True`.
    """
    skip = private.FRAME_SKIPPED
    inside = skip if recursively else private.FRAME_TRACED
    private.set_code_exec_strategy(function.__code__, private.FrameExecStrategy(skip, inside))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]


def dynamo_is_active() -> bool:
    """Return True if the calling code runs inside a function that torch.compile compiles."""
    return bool(private.get_eval_frame_callback())


keep_dynamo_out(dynamo_is_active, "it reads the state of Dynamo itself")


class _Around(threading.local):
    callback: Any = None  # of the compiled code that called us
    backend: str = ""  # name of the last one that compiled for a plan
    planned: bool = False  # the code that Dynamo compiles and looks up is that of plans
    compiling: Callable[[], AbstractContextManager[None]] | None = None  # around a compilation


_around = _Around()


class _PlannedBackend:
    """A backend whose code Dynamo keeps apart from that of the same backend without a plan."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _PlannedBackend) and bool(self.backend == other.backend)

    def __hash__(self) -> int:
        return hash((_PlannedBackend, self.backend))


class _Callback:
    """Compile frames as `callback` does, within the context of `compile_within`.

    Dynamo reuses code only for calls with an equal backend. It guards neither on what is planned nor on the
    hooks of a plan. It finds the backend by following `_torchdynamo_orig_backend` of the callback.

    Args:
        planned: keep the code apart from that of unplanned calls.
    """

    def __init__(self, callback: Any, *, planned: bool) -> None:
        self.callback, self.planned = callback, planned
        backend = callback
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        self._torchdynamo_orig_backend = _PlannedBackend(backend) if planned else backend
        if planned:
            _around.backend = getattr(backend, "compiler_name", type(backend).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _around.compiling is None:
            return self.callback(*args, **kwargs)
        with _around.compiling():
            return self.callback(*args, **kwargs)


def compile_within(context: Callable[[], AbstractContextManager[None]] | None) -> None:
    """Enter `context()` whenever Dynamo compiles a frame on this thread from now on; None: nothing."""
    _around.compiling = context


def with_code_of_plans(callback: Any) -> Any:
    """Return `callback` for Dynamo to use here: in planned forwards with code of their own."""
    plain = callback.callback if isinstance(callback, _Callback) else callback
    if not callable(plain) or not (_around.planned or _around.compiling is not None):
        return plain
    return _Callback(plain, planned=_around.planned)


def backend_of_plans() -> str:
    """Return the name of the backend that compiled last for a plan on this thread."""
    return _around.backend


def use_code_of_plans(planned: bool) -> None:
    """Have Dynamo use code on this thread that only planned forwards run, or code that only others run."""
    _around.planned = planned


def call_outside_dynamo(call: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Return `call(*args)`, run without Dynamo even if a compiled function makes the call."""
    outer = _around.callback
    callback = _around.callback = private.set_eval_frame(None)
    try:
        return call(*args)
    finally:
        _around.callback = outer
        private.set_eval_frame(with_code_of_plans(callback))


keep_dynamo_out(call_outside_dynamo, "it switches Dynamo off")


def is_called_compiled(model: Any) -> bool:
    """Return True if a call of `model` runs the whole forward compiled: itself, or its caller is compiled."""
    return is_compiled(model) or callable(_around.callback)


def runs_compiled(entry: Any) -> bool:
    """Return True if torch.compile runs the model, or parts of it."""
    return is_called_compiled(entry) or bool(compiled_parts(entry))


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` was called on, or `model` itself."""
    return model._orig_mod if is_optimized(model) else model  # type: ignore[return-value]


def keep_contexts(model: nn.Module, memo: dict[int, Any]) -> None:
    """Have `copy.deepcopy(model, memo)` compile each module in the context of the original."""
    for module in model.modules():
        if is_optimized(module):
            memo[id(module.dynamo_ctx)] = module.dynamo_ctx


def compile_copies(modules: Iterable[nn.Module], memo: Mapping[int, Any]) -> None:
    """Compile the copies of those of `modules` that `module.compile()` was called on, as these are.

    Args:
        modules: which were copied.
        memo: of `copy.deepcopy`: the copies, by id of the original.
    """
    for module in modules:
        if (call := module._compiled_call_impl) is not None:
            wrapper: Any = getattr(call, "wrapped", call)  # that of WatchedCompiledCall
            variables = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
            copied = memo[id(module)]
            copied._compiled_call_impl = variables["self"].cell_contents(copied._call_impl)


class RecordingMode(TorchDispatchMode):
    """A dispatch mode that records ops, and does not see those of compiled code and of FSDP: a region."""

    supports_higher_order_operators = True  # each passes as one opaque op

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, or else Dynamo would leave compiled submodules uncompiled (pytorch#164143)."""
        return True


def watch_compiled() -> bool:
    """Call `enter_compiled` and `leave_compiled` of the modes from now on.

    torch has no hook for this. `torch._inductor.config.wrap_inductor_compiled_regions` shows compiled code as
    one op, but only code compiled after it was set, and without the inputs that it writes.

    Returns:
        False if nothing can have been compiled in this process so far.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    graph_class = private.compiled_graph_class()
    if not hasattr(graph_class.__call__, "__wrapped__"):
        graph_class.__call__ = _wrapped_call(graph_class.__call__)
    return True


def anything_compiled() -> bool:
    """Return True if compiled code of Inductor exists in this process. Slow."""
    graph_class = private.compiled_graph_class()
    return any(type(thing) is graph_class for thing in gc.get_objects())


def _wrapped_call(call: Callable[[Any, Sequence[Any]], Any]) -> Callable[[Any, Sequence[Any]], Any]:
    @wraps(call)
    def hidden_call(graph: Any, inputs: Sequence[Any]) -> Any:
        modes = recording_modes()
        captured = getattr(graph, "cudagraph_info", None) is not None
        if not modes or any(mode.examines(captured=captured) for mode in modes):
            return call(graph, inputs)
        with opaque_region([inputs[i] for i in graph.mutated_input_idxs if isinstance(inputs[i], Tensor)]):
            return call(graph, inputs)

    return hidden_call


def recording_modes() -> list[Any]:
    """Return the recording modes that are active on this thread."""
    return [mode for mode in get_current_dispatch_mode_stack() if isinstance(mode, RecordingMode)]


class opaque_region:
    """Hide the ops inside from the modes that record, except that they write `written`.

    Recording modes on top of the stack are taken off it. A mode that lets ops pass would still cost time, and
    memory: torch makes a tensor of a number, such as that of `x * 2.0`, once more for each mode.
    """

    def __init__(self, written: Sequence[Tensor]) -> None:
        self._written = written

    def __enter__(self) -> None:
        self._modes = recording_modes()
        for mode in self._modes:
            mode.enter_compiled(self._written)
        del self._written
        stack = get_current_dispatch_mode_stack()
        self._off = list(takewhile(lambda mode: isinstance(mode, RecordingMode), reversed(stack)))
        for _ in self._off:
            private.pop_dispatch_stack(None)

    def __exit__(self, *_: Any) -> None:
        for mode in reversed(self._off):
            private.push_on_dispatch_stack(mode)
        for mode in self._modes:
            mode.leave_compiled()


def hidden_from_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with its ops hidden from the modes that record."""

    @wraps(function)
    def hidden(*args: Any, **kwargs: Any) -> Any:
        with opaque_region(()):
            return function(*args, **kwargs)

    return hidden
