"""See where a call of backward begins and where it has returned, on the thread that makes it.

The engine restores the state of its thread when it returns, so torch.profiler cannot be stopped from inside
of backward. All of torch's own functions (`backward`, `grad`, their callers) reach the engine through one
name, which stands here while somebody watches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
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
            setattr(torch.autograd, private.ENGINE_RUN_BACKWARD, _run_backward)

    def close(self) -> None:
        """Watch no longer. May be called twice."""
        with _lock:
            if self in _watchers:
                _watchers.remove(self)
            if not _watchers:
                setattr(torch.autograd, private.ENGINE_RUN_BACKWARD, private.engine_run_backward)


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    watchers = [watcher for watcher in _watchers if watcher.thread == threading.get_ident()]
    for watcher in watchers:
        if not watcher.depth:
            watcher.begins(args[0], args[1])
        watcher.depth += 1
    raised = True
    try:
        out = private.engine_run_backward(*args, **kwargs)
        raised = False
        return out
    finally:
        for watcher in watchers:
            watcher.depth -= 1
            if not watcher.depth:
                watcher.ended(raised)
