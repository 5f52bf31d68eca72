"""Compile the models of each test from scratch, on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from stepping import COMPILES

collect_ignore_glob = [] if COMPILES else ["test_*.py"]


@pytest.fixture(autouse=True)
def fresh_compiler(one_thread: None) -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
