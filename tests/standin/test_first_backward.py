"""Test how profiles count memory that a GPU's libraries allocate in a first backward."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from blocks import Body
from torch import Tensor

from autoac.profiler import profile
from autoac.tape.torch_facts import libraries

KEPT = 1 << 20  # bytes that a library keeps between its calls


class Keeps(torch.autograd.Function):
    """Allocate memory in the first backward and keep it, as cuBLAS does."""

    kept: list[Tensor] = []  # noqa: RUF012 - of the process

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if not Keeps.kept:
            Keeps.kept.append(torch.empty(KEPT, dtype=torch.uint8, device="cuda"))
        return gradient.clone()


def test_memory_that_a_library_keeps_counts_at_every_moment(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step has it from its first op on."""
    model = Body(lambda m, x: (Keeps.apply(m.inner(x).tanh()).tanh() @ m.weight).tanh()).cuda()
    x = torch.randn(4, 4, device="cuda")
    Keeps.kept.append(torch.empty(0))
    without = profile(model, x)
    Keeps.kept.clear()
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", Keeps.kept.clear)
    found = profile(model, x)
    assert found.keys() == without.keys()
    assert found.static.workspaces == found.static.total - without.static.total == KEPT
    assert found.ops.other_nbytes == without.ops.other_nbytes
    assert found.ops.workspace_nbytes == without.ops.workspace_nbytes
    assert found.backward.other_nbytes == without.backward.other_nbytes
    assert found.backward.peak_nbytes == without.backward.peak_nbytes
    assert found.gradient_nbytes == without.gradient_nbytes


def test_workspaces_of_cublas_are_freed_on_both_threads(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps workspaces by thread, and backward of a GPU's ops runs on a thread of its own."""
    threads: list[int] = []
    clear = lambda: threads.append(threading.get_native_id())  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear)
    assert not libraries.free_workspaces(torch.device("cpu"))
    assert not threads
    assert libraries.free_workspaces(torch.device("cuda", 1))
    here, there = threads
    assert here == threading.get_native_id() != there


def test_workspaces_stay_where_a_captured_graph_may_have_the_address_of_one(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = [{"segment_pool_id": (0, 0)}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda include_traces: pools)
    device = torch.device("cuda", 0)
    gpu.set_workspace(KEPT)
    weight = torch.ones(2, 2, device=device)
    torch.mm(weight, weight)
    held = gpu.live(0)
    pools.append({"segment_pool_id": (0, 1)})
    assert not libraries.free_workspaces(device)
    assert gpu.live(0) == held
    pools.pop()
    with monkeypatch.context() as patch:  # this one cannot say
        patch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
        assert not libraries.free_workspaces(device)
    assert libraries.free_workspaces(device)
    assert gpu.live(0) == held - KEPT
