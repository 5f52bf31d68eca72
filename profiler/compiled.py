"""Inductor's compiled code inside a recorded forward: one opaque step, of which only its writes are told.

Its kernels write over buffers of which no dispatch mode is told, also over what the ops returned that it
calls by the dispatcher. So recorded one by one those ops would be made again from memory that is something
else by then. And what it writes of its own inputs, only the graph itself knows.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


class SeesCompiled(TorchDispatchMode):
    """A mode that is told where compiled code begins and ends."""

    def enter_compiled(self, written: Sequence[Tensor]) -> None:
        """Compiled code runs next, and writes these of its inputs."""
        raise NotImplementedError

    def leave_compiled(self) -> None:
        """It has run, or raised."""
        raise NotImplementedError


def watch_compiled() -> bool:
    """From now on tell the modes; False if nothing can have been compiled in this process so far.

    torch has no hook there. `torch._inductor.config.wrap_inductor_compiled_regions` shows the code as one
    op, but only code that is compiled after it was set, and it does not say what is written.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._inductor.output_code import CompiledFxGraph

    if not hasattr(CompiledFxGraph.__call__, "__wrapped__"):
        CompiledFxGraph.__call__ = _telling(CompiledFxGraph.__call__)  # type: ignore[method-assign, assignment]
    return True


def anything_compiled() -> bool:
    """Whether Inductor's code exists in this process. Slow."""
    from torch._inductor.output_code import CompiledFxGraph

    return any(type(thing) is CompiledFxGraph for thing in gc.get_objects())


def _telling(call: Callable[[Any, Sequence[Any]], Any]) -> Callable[[Any, Sequence[Any]], Any]:
    @wraps(call)
    def telling(graph: Any, inputs: Sequence[Any]) -> Any:
        modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, SeesCompiled)]
        if not modes:
            return call(graph, inputs)
        written = [inputs[i] for i in graph.mutated_input_idxs if isinstance(inputs[i], Tensor)]
        for mode in modes:
            mode.enter_compiled(written)
        del written
        try:
            return call(graph, inputs)
        finally:
            for mode in modes:
                mode.leave_compiled()

    return telling
