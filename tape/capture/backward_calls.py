"""See where a call of backward begins and where it has returned, on the thread that makes it.

The engine restores the state of its thread when it returns, so torch.profiler cannot be stopped from inside
of backward. All calls reach the engine through one attribute of `Variable`: those of torch's own functions
(`backward`, `grad`, their callers), and those of libraries that call the engine itself, as the pipeline
schedules of Megatron and apex do. While somebody watches, another object is in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from autoac.tape.torch_facts import private

Begins = Callable[[Sequence[Any], Sequence[Tensor | None]], None]

_lock = threading.Lock()
_watchers: list[BackwardCalls] = []


class BackwardCalls:
    """Watch the outermost calls of backward on the thread that made this object, from `open` to `close`.

    Args:
        begins: called before a call, with the tensors from which it starts and their gradients.
        ended: called after a call, with True if it raised.
    """

    def __init__(self, begins: Begins, ended: Callable[[bool], None]) -> None:
        self.begins, self.ended = begins, ended
        self.thread = threading.get_ident()
        self.depth = 0

    def open(self) -> None:
        """Begin to watch."""
        with _lock:
            _watchers.append(self)
            setattr(*private.EXECUTION_ENGINE, _watched_engine)

    def close(self) -> None:
        """Watch no longer. May be called twice."""
        with _lock:
            if self in _watchers:
                _watchers.remove(self)
            if not _watchers:
                setattr(*private.EXECUTION_ENGINE, private.execution_engine)

    @contextmanager
    def call(self, tensors: Sequence[Any], grad_tensors: Sequence[Tensor | None]) -> Iterator[None]:
        """Note a call of backward around the body."""
        self.depth += 1
        raised = True
        try:
            if self.depth == 1:
                self.begins(tensors, grad_tensors)
            yield
            raised = False
        finally:
            self.depth -= 1
            if not self.depth:
                self.ended(raised)


class _WatchedEngine:
    """Autograd's engine, whose calls of backward the watchers see."""

    def __getattr__(self, name: str) -> Any:
        return getattr(private.execution_engine, name)

    def run_backward(
        self, tensors: Sequence[Any], grad_tensors: Sequence[Tensor | None], *args: Any, **kwargs: Any
    ) -> Any:
        """Run backward from `tensors`, as the engine does."""
        watchers = [watcher for watcher in _watchers if watcher.thread == threading.get_ident()]
        with ExitStack() as stack:
            for watcher in watchers:
                stack.enter_context(watcher.call(tensors, grad_tensors))
            return private.execution_engine.run_backward(tensors, grad_tensors, *args, **kwargs)


_watched_engine = _WatchedEngine()
