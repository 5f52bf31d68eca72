"""A step that runs out of memory is undone, planned again and run once more, where the caller allowed it."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from stepping import binding_budget, nothing_left, scalar, seeded
from torch import Tensor, nn

import ac_client
from ac_client.planning import plan_batch
from ac_client.planning.oom_retry import is_out_of_memory
from ac_client.runtime.policy_context import active
from autoac.planner import plan
from autoac.planner.units import GIB
from autoac.profiler import profile
from benchmarks.models.modules import Transformer

BATCH = torch.randn(4, 48, 32)
CPU_WORDS = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
)


def no_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap) -> Tensor:
        ctx.trap = trap
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.trap.spring("backward")
        return grad, None


AIMS: weakref.WeakKeyDictionary[Trap, SimpleNamespace] = weakref.WeakKeyDictionary()
"""Outside of the model, where nothing is put back."""


class Trap(nn.Module):
    """A module that runs out of memory a given number of times."""

    def __init__(self) -> None:
        super().__init__()
        AIMS[self] = SimpleNamespace(where="", times=0)
        self.error: Callable[[], Exception] = no_memory

    @property
    def aim(self) -> SimpleNamespace:
        return AIMS[self]

    def spring(self, where: str) -> None:
        if where == self.aim.where and self.aim.times:
            self.aim.times -= 1
            raise self.error()

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.spring("forward")
        return Raise.apply(x, self)


class Trapped(nn.Module):
    """Dropout and statistics move in forward, before and after the trap."""

    def __init__(self) -> None:
        super().__init__()
        self.before = Transformer(layers=1, width=32)
        self.norm = nn.BatchNorm1d(48)
        self.trap = Trap()
        self.after = Transformer(layers=1, width=32)
        self.calls = 0
        self.counted = torch.zeros(2)  # no buffer

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.counted.add_(1)
        return self.after(self.trap(self.norm(self.before(x)["logits"])))["logits"]


@pytest.fixture(scope="module")
def budget_gb() -> float:
    return binding_budget(profile(seeded(Trapped), BATCH), 0.6) / GIB


def run(model: nn.Module) -> None:
    scalar(model(BATCH)).backward()


def planned(budget_gb: float) -> tuple[Trapped, Callable[[], None]]:
    model = ac_client.apply(seeded(Trapped), budget_gb)
    run(model)
    model.zero_grad()
    return model, lambda: run(model)


def state(model: Trapped) -> list[Tensor]:
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    kept = [model.counted.clone(), torch.tensor(model.calls)]
    return [*gradients, *(b.clone() for b in model.buffers()), *kept, torch.get_rng_state()]


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    assert all(map(torch.equal, a, b))


def plain(steps: int, *, accumulate: bool = False) -> list[Tensor]:
    """After the planning step and so many more."""
    model = seeded(Trapped)
    run(model)
    model.zero_grad()
    torch.manual_seed(5)
    for _ in range(steps):
        if not accumulate:
            model.zero_grad()
        run(model)
    return state(model)


def test_retried_step_draws_the_same_random_numbers_from_python_and_numpy(budget_gb: float) -> None:
    model, step = planned(budget_gb)
    random.seed(5)
    numpy.random.seed(5)
    want = random.random(), numpy.random.rand()
    random.seed(5)
    numpy.random.seed(5)
    model.trap.aim.where, model.trap.aim.times = "forward", 1

    def drawing() -> tuple[float, float]:
        drawn = random.random(), numpy.random.rand()
        step()
        return drawn

    assert ac_client.applied(model).step(drawing, retry_oom=True) == want
    assert ac_client.applied(model).report().retries == 1


def nothing_open() -> bool:
    return torch._C._len_torch_dispatch_stack() == 0 and active.region is None


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_retried_step_gives_the_result_of_a_first_run(budget_gb: float, where: str) -> None:
    want = plain(2)
    model, step = planned(budget_gb)
    at = ac_client.applied(model)
    had = at.report()
    torch.manual_seed(5)
    model.trap.aim.where, model.trap.aim.times = where, 1
    for _ in range(2):
        model.zero_grad()
        at.step(step, retry_oom=True)
    assert_same(state(model), want)
    report = at.report()
    assert model.trap.aim.times == 0
    assert report.retries == 1
    assert report.predicted_peak_bytes <= 0.9 * had.predicted_peak_bytes
    assert report.recompute_us >= had.recompute_us
    assert at.policy.corrected_by_bytes == report.corrected_by_bytes > 0
    assert nothing_open()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("keep", [False, True])
def test_accumulated_gradients_are_undone_only_with_keep_gradients(
    budget_gb: float, where: str, keep: bool
) -> None:
    model, step = planned(budget_gb)
    at = ac_client.applied(model)
    torch.manual_seed(5)
    for _ in range(2):  # the second finds gradients and is planned with them
        at.step(step, retry_oom=True, keep_gradients=keep)
    model.trap.aim.where, model.trap.aim.times = where, 1
    if where == "backward" and not keep:  # the modules behind the trap have added to theirs
        with pytest.raises(torch.OutOfMemoryError) as raised:
            at.step(step, retry_oom=True, keep_gradients=keep)
        assert "keep_gradients=True" in "".join(raised.value.__notes__)
        assert at.report().retries == 0
    else:
        at.step(step, retry_oom=True, keep_gradients=keep)
        assert_same(state(model), plain(3, accumulate=True))
    assert nothing_open()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_error_is_raised_with_advice_without_retry_oom(budget_gb: float, where: str) -> None:
    model, step = planned(budget_gb)
    model.trap.aim.where, model.trap.aim.times = where, 1
    with pytest.raises(torch.OutOfMemoryError) as raised:
        ac_client.applied(model).step(step)
    notes = "\n".join(raised.value.__notes__)
    assert "retry_oom=True was not passed" in notes
    assert notes.count("smaller budget_gb") == 1
    assert "planned peak was" in notes
    assert nothing_open()
    del raised
    model.zero_grad()
    torch.manual_seed(5)
    step()


def test_out_of_memory_in_a_plain_loop_has_advice(budget_gb: float) -> None:
    model, step = planned(budget_gb)
    model.trap.aim.where, model.trap.aim.times = "forward", 1
    with pytest.raises(torch.OutOfMemoryError) as raised:
        step()
    assert "A planned forward ran out of memory" in "".join(raised.value.__notes__)
    assert nothing_open()


@pytest.mark.parametrize("in_step", [False, True])
def test_out_of_memory_in_the_first_step_is_not_advised_to_retry(budget_gb: float, in_step: bool) -> None:
    model = ac_client.apply(seeded(Trapped), budget_gb)
    model.trap.aim.where, model.trap.aim.times = "forward", 1
    at = ac_client.applied(model)
    step = partial(at.step, partial(run, model), retry_oom=True) if in_step else partial(run, model)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        step()
    notes = "\n".join(raised.value.__notes__)
    assert "Profiling a step ran out of memory" in notes
    assert "policy=" in notes
    assert "retry_oom" not in notes


def test_second_out_of_memory_error_is_raised(budget_gb: float) -> None:
    model, step = planned(budget_gb)
    model.trap.aim.where, model.trap.aim.times = "backward", 2
    with pytest.raises(torch.OutOfMemoryError) as raised:
        ac_client.applied(model).step(step, retry_oom=True)
    assert "ran out again" in "".join(raised.value.__notes__)
    assert nothing_open()


def test_each_retry_tightens_the_plan_until_none_is_tighter(
    budget_gb: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last plans before the floor take long, and how good they are is not the question.
    monkeypatch.setattr(plan_batch, "plan", partial(plan, gap=1.0, work_limit=0.2))
    model, step = planned(budget_gb)
    at = ac_client.applied(model)
    peaks = [at.policy.predicted.peak_bytes]

    def run_out() -> None:
        for _ in range(20):
            model.zero_grad()
            model.trap.aim.where, model.trap.aim.times = "forward", 1
            at.step(step, retry_oom=True)
            peaks.append(at.policy.predicted.peak_bytes)

    with pytest.raises(torch.OutOfMemoryError) as raised:
        run_out()
    assert peaks == sorted(set(peaks), reverse=True)
    assert "no tighter plan" in "".join(raised.value.__notes__)
    assert "spring" in "".join(raised.value.__notes__), "the traceback still names the origin"
    model.zero_grad()
    at.step(step, retry_oom=True)


def test_other_errors_are_raised_unchanged(budget_gb: float) -> None:
    model, step = planned(budget_gb)
    model.trap.aim.where, model.trap.aim.times = "forward", 1
    model.trap.error = lambda: ValueError("no")
    with pytest.raises(ValueError, match="no") as raised:
        ac_client.applied(model).step(step, retry_oom=True)
    assert not getattr(raised.value, "__notes__", [])


def test_optimizer_in_backward_is_not_run_twice(budget_gb: float) -> None:
    model, step = planned(budget_gb)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(written)
    model.trap.aim.where, model.trap.aim.times = "backward", 1
    with pytest.raises(torch.OutOfMemoryError) as raised:
        ac_client.applied(model).step(step, retry_oom=True)
    assert "written to parameters" in "".join(raised.value.__notes__)


def test_fused_optimizer_in_backward_is_not_run_twice(budget_gb: float) -> None:
    """Its kernel writes parameters past their version counters."""
    model, step = planned(budget_gb)
    for parameter in model.parameters():
        sgd = torch.optim.SGD([parameter], lr=0.1, fused=True)
        parameter.register_post_accumulate_grad_hook(lambda _, sgd=sgd: sgd.step())
    model.trap.aim.where, model.trap.aim.times = "backward", 1
    with pytest.raises(torch.OutOfMemoryError) as raised:
        ac_client.applied(model).step(step, retry_oom=True)
    assert "written to parameters" in "".join(raised.value.__notes__)


def written(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(0.1)


def test_policy_from_elsewhere_cannot_be_planned_again(budget_gb: float) -> None:
    first, _ = planned(budget_gb)
    model = ac_client.apply(seeded(Trapped), policy=ac_client.applied(first).policy)
    model.trap.aim.where, model.trap.aim.times = "forward", 1
    with pytest.raises(torch.OutOfMemoryError) as raised:
        ac_client.applied(model).step(lambda: run(model), retry_oom=True)
    assert "budget_gb" in "".join(raised.value.__notes__)


def test_step_returns_the_result_of_its_function(budget_gb: float) -> None:
    model, _ = planned(budget_gb)

    def step() -> float:
        loss = scalar(model(BATCH))
        loss.backward()
        return loss.item()

    assert isinstance(ac_client.applied(model).step(step, retry_oom=True), float)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_failed_step_is_freed_before_the_retry(budget_gb: float, where: str) -> None:
    model, _ = planned(budget_gb)
    at, live = ac_client.applied(model), []

    def step() -> None:
        live.append(sum(type(o) is torch.UntypedStorage for o in gc.get_objects()))
        run(model)

    at.step(step, retry_oom=True)
    model.zero_grad()
    model.trap.aim.where, model.trap.aim.times = where, 1
    live.clear()
    at.step(step, retry_oom=True)
    assert len(live) == 2
    assert live[1] <= live[0]
    model.zero_grad()
    with nothing_left():
        model.trap.aim.where, model.trap.aim.times = where, 1
        with pytest.raises(torch.OutOfMemoryError):
            at.step(step)
        model.zero_grad()


def test_out_of_memory_errors_are_recognized() -> None:
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError(CPU_WORDS))
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might"))
    assert is_out_of_memory(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    )
    assert not is_out_of_memory(torch.AcceleratorError("CUDA error: an illegal memory access"))
    assert not is_out_of_memory(RuntimeError("x"))
    assert not is_out_of_memory(MemoryError())
    assert not is_out_of_memory(None)
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
