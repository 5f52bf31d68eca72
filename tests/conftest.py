"""Share a machine with another worker, and keep the garbage collector away from what all tests import."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Threads of two workers and of their children wait for one another spinning: three to ten times the CPU time.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else two more processes import torch

# Without bytecode each worker compiles all tests again, and each child all of our modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    """Freeze the heap: most of a million objects, which each `gc.collect` of a test would visit."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Compute on one thread: some kernels allocate workspace for each, so peaks and plans depend on it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start Chromium."""
    from serving import chromium

    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def unseen_kernels() -> None:
    """Build the kernels that PyTorch does not dispatch. Without a compiler, skip the test."""
    from unseen_kernels.library import NoCompiler, compiled

    try:
        compiled()
    except NoCompiler as error:
        pytest.skip(str(error))
