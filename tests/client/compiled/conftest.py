"""Compile the models of each test from scratch, on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    torch.set_num_threads(before)
