"""Compile the models of each test from scratch, on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from stepping import COMPILES

collect_ignore_glob = [] if COMPILES else ["test_*.py"]


WARNINGS_OF_TORCH = [
    "ignore:The .grad attribute of a Tensor:UserWarning",
    "ignore:.*torch.compiler.disable:UserWarning",
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
]


def pytest_itemcollected(item: pytest.Item) -> None:
    for warning in WARNINGS_OF_TORCH:
        item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def fresh_compiler(one_thread: None) -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
