"""The libraries' loops on one thread: models this small only lose on more."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    pass
