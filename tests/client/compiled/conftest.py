"""Compile the models of each test from scratch, on one thread."""

from __future__ import annotations

import pytest
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
def _fresh_compiler(one_thread: None, fresh_compiler: None) -> None:
    pass
