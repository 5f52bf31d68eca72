"""Run a function in a forked process, which starts with nothing allocated: to measure, and to compare."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_in_child(function: Callable[..., T], *args: object, limit_s: float | None = None) -> T:
    """Return the result of a call in a child process, which starts with nothing allocated.

    The child is forked, so that nothing is imported again: the parent must not have run a kernel on several
    threads, nor a solver.

    Raises:
        RuntimeError: the child failed; its traceback is on stderr.
        TimeoutError: it took longer than `limit_s` seconds, and was killed.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        sender.send(function(*args))

    child = context.Process(target=run)
    child.start()
    sender.close()
    try:
        if not receiver.poll(limit_s):
            child.kill()
            raise TimeoutError(f"{_name(function)} must end within {limit_s} s")
        result: T = receiver.recv()
    except EOFError:
        raise RuntimeError(f"{_name(function)}({str(args)[1:80]}) failed; see the traceback above") from None
    finally:
        child.join()
    return result


def _name(function: Callable[..., object]) -> str:
    return str(getattr(getattr(function, "func", function), "__name__", "the call"))  # `func` of a partial
