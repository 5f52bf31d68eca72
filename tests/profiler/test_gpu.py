"""What is otherwise on a GPU, shown where there is none: by what stands in for its allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import Transformer
from torch import Tensor, nn

from autoac.planner import bounds, build
from autoac.profiler import CannotProfile, hollow, observe, profile
from autoac.profiler.ops import facts_of
from autoac.profiler.recording import Allocated, Entry, Marked, Recording

KEPT = 1 << 20  # bytes that a library keeps between its calls


class Keeps(torch.autograd.Function):
    """Backward takes something the first time that it runs, and keeps it, as cuBLAS does."""

    kept: list[Tensor] = []  # noqa: RUF012 - of the process

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if not Keeps.kept:
            Keeps.kept.append(torch.empty(KEPT, dtype=torch.uint8))
        return gradient.clone()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(Keeps.apply(self.first(x).tanh()).tanh())
        return y.tanh()


def test_what_backward_takes_once_and_keeps_is_there_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step finds it there from its first op on."""
    model, x = Model(), torch.randn(4, 8)
    Keeps.kept.append(torch.empty(0))
    without = profile(model, x)
    Keeps.kept.clear()

    def forget(_device: torch.device) -> bool:
        Keeps.kept.clear()
        return True

    monkeypatch.setattr(hollow, "forget_workspaces", forget)
    found = profile(model, x)
    assert found.keys() == without.keys()
    more = [b - a for a, b in zip(without.ops.other_nbytes, found.ops.other_nbytes, strict=True)]
    assert more == [KEPT] * len(more)
    for measure in ("other_nbytes", "peak_nbytes"):
        before, after = getattr(without.backward, measure), getattr(found.backward, measure)
        assert [b - a for a, b in zip(before, after, strict=True)] == [KEPT] * len(before), measure
    assert found.ops.workspace_nbytes == without.ops.workspace_nbytes
    assert found.gradient_nbytes == without.gradient_nbytes + KEPT


class Tries(torch.autograd.Function):
    """Backward tries several ways the first time that it runs, as cuDNN does."""

    tried = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if not Tries.tried:
            Tries.tried = True
            torch.empty(KEPT, dtype=torch.uint8)
        return gradient.clone()


class Trying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Transformer(layers=2, dropout=0.1)

    def forward(self, x: Tensor) -> Any:
        return Tries.apply(self.inner(x)["logits"])


@pytest.mark.parametrize("accumulates", [False, True])
def test_what_only_a_first_backward_needs_is_not_in_the_profile(
    accumulates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Trying(), torch.randn(2, 8, 32)
    Tries.tried = True
    usual = observe(model, (x,), {}, accumulates=accumulates)
    state = torch.get_rng_state()
    monkeypatch.setattr(hollow, "chooses_at_first", lambda _device: True)
    Tries.tried = False
    found = observe(model, (x,), {}, accumulates=accumulates)
    assert Tries.tried
    assert found.fingerprint == usual.fingerprint
    assert found.backward.peak_nbytes == usual.backward.peak_nbytes
    assert found.backward.other_nbytes == usual.backward.other_nbytes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_on_a_gpu_alone_is_a_first_backward_unlike_the_others() -> None:
    assert hollow.chooses_at_first(torch.device("cuda", 0))
    assert not hollow.chooses_at_first(torch.device("cpu"))


def test_workspaces_of_cublas_are_given_back_on_both_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps some for each thread, and backward of a GPU's ops has its own."""
    calls: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append("here"), raising=False)

    def there(call: Callable[[], None], device: torch.device) -> None:
        calls.append(f"backward on {device}")
        call()

    monkeypatch.setattr(hollow, "in_backward", there)
    hollow.forget_workspaces(torch.device("cpu"))
    assert not calls
    hollow.forget_workspaces(torch.device("cuda", 1))
    assert calls == ["here", "backward on cuda:1", "here"]


def test_a_call_in_backward_is_made_once_by_the_engine() -> None:
    tasks: list[int] = []
    with torch.no_grad():
        hollow.in_backward(lambda: tasks.append(torch._C._current_graph_task_id()), torch.device("cpu"))
    assert len(tasks) == 1
    assert tasks[0] >= 0


def test_a_plain_step_may_get_larger_blocks_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's caching allocator does not split a block of which less than a mebibyte would be left."""
    entries = Recording.entries
    records: list[Recording] = []

    def larger(recording: Recording) -> Iterator[Entry]:
        records.append(recording)
        for entry in entries(recording):
            if isinstance(entry, Allocated) and entry.nbytes > 0:
                yield replace(entry, nbytes=entry.nbytes + 64 * len(records))
            else:
                yield entry

    monkeypatch.setattr(Recording, "entries", larger)
    model, x = Transformer(layers=1), torch.randn(2, 8, 32)
    assert profile(model, x, mode="measured").keys() == profile(model, x).keys()
    assert len(records) == 3


def test_larger_blocks_are_planned_with_and_are_no_other_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same step, profiled with more or less in the allocator's cache, has one fingerprint."""
    entries = Recording.entries
    slack = 0

    def larger(recording: Recording) -> Iterator[Entry]:
        for entry in entries(recording):
            grows = isinstance(entry, Allocated) and entry.nbytes > 0
            yield replace(entry, nbytes=entry.nbytes + slack) if grows else entry  # type: ignore[type-var, call-arg]

    monkeypatch.setattr(Recording, "entries", larger)
    model, x = Transformer(layers=1), torch.randn(2, 8, 32)
    exact = profile(model, x)
    slack = 100
    found = profile(model, x)
    assert found.fingerprint == exact.fingerprint
    assert found.storages.nbytes == exact.storages.nbytes
    assert set(found.storages.slack_nbytes) == {100}
    more = bounds(build(found)).ceiling - bounds(build(exact)).ceiling
    assert more > 0
    assert more % 100 == 0


def test_an_allocator_that_reports_nothing_is_no_step_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's `cudaMallocAsync` and pluggable allocators tell torch.profiler nothing."""
    entries = Recording.entries
    monkeypatch.setattr(
        Recording, "entries", lambda self: (e for e in entries(self) if isinstance(e, Marked))
    )
    with pytest.raises(CannotProfile, match="reports nothing"):
        profile(Model(), torch.randn(4, 8))


@pytest.mark.parametrize("name", ["_cudnn_rnn", "miopen_rnn", "_cudnn_init_dropout_state"])
def test_recurrent_layers_of_a_gpu_are_never_run_again(name: str) -> None:
    """Their dropout draws from a buffer of cuDNN's that each call moves on: a second call draws otherwise."""
    facts = facts_of(getattr(torch.ops.aten, name).default)
    assert facts.kept
    assert facts.must_save == "it draws from a state that its library keeps"
    assert facts.draws((), {}), "torch's generator too, for what it says of itself"
