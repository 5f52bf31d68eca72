"""The two leaves that most tests of checkpoints compute with."""

from __future__ import annotations

import pytest
from checkpoints import leaf
from torch import Tensor


@pytest.fixture
def x() -> Tensor:
    return leaf(4, 4)


@pytest.fixture
def w() -> Tensor:
    return leaf(4, 4, seed=1)
