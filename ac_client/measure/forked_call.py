"""Run a function in a forked process, which starts with nothing allocated: to measure, and to compare."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator, Iterable
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
    (result,) = _in_child(lambda: [function(*args)], _call(function, args), limit_s)
    return result


def iterate_in_child(function: Callable[..., Iterable[T]], *args: object) -> Generator[T, None, None]:
    """Yield what a generator function yields in a child process, forked as by `run_in_child`.

    The child computes an item while the parent waits for it, and rests between two items. It ends with the
    parent, or when the generator that is returned is closed.

    Raises:
        RuntimeError: the child failed; its traceback is on stderr.
    """
    return _in_child(lambda: function(*args), _call(function, args))


def _in_child(
    items: Callable[[], Iterable[T]], call: str, limit_s: float | None = None
) -> Generator[T, None, None]:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def run() -> None:
        here.close()  # so that the child sees the end of the parent
        for item in items():
            there.send(item)
            there.recv()

    child = context.Process(target=run)
    child.start()
    there.close()
    try:
        while here.poll(limit_s):
            yield here.recv()
            here.send(None)
        raise TimeoutError(f"{call} must end within {limit_s} s")
    except EOFError:
        child.join()
        if child.exitcode:
            raise RuntimeError(f"{call} failed; see the traceback above") from None
    finally:
        child.kill()
        child.join()


def _call(function: Callable[..., object], args: tuple[object, ...]) -> str:
    name = getattr(getattr(function, "func", function), "__name__", "the call")  # `func` of a partial
    return f"{name}({str(args)[1:80]})"
