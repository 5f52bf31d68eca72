"""The libraries' loops on one thread: models this small only lose on more. Calls of the user's code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data._utils.fetch import _MapDatasetFetcher

Calls = Callable[..., dict[str, int]]


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture
def calls_of(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Return a function that returns the calls so far of methods, and the batches that loaders read.

    Pass it a class and names of its methods to count their calls from then on.
    """
    patched: dict[str, int] = {}

    def count(owner: type, name: str) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def counting(*args: Any, **kwargs: Any) -> Any:
            patched[name] = patched.get(name, 0) + 1
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    def calls(owner: type | None = None, *names: str) -> dict[str, int]:
        if owner is not None:
            for name in names:
                count(owner, name)
            count(_MapDatasetFetcher, "fetch")
        seen = dict(patched)
        patched.clear()
        return seen

    return calls
