"""Capture planned steps into CUDA graphs: replays compute what eager steps of the plain model compute."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import ac_client
from ac_client.planning.facts import host_budget
from autoac.planner import Constraints, bounds, build
from autoac.planner.formats.profile import LinkRates
from autoac.planner.units import GIB
from autoac.profiler import observe
from autoac.tape.errors import CannotCapture
from autoac.tape.torch_facts.libraries import pool_nbytes
from standin.tasks import LanguageModel, ids, of_zoo
from standin.training import Task, Training

WARM_UP = 3  # as torch's documentation has it
REPLAYS = 20


def of_transformers(name: str) -> Task:
    """Return a task with a mask of four dimensions, which transformers takes as it is.

    It reads masks of two dimensions on the host, but not in a capture, where the model then runs other ops.
    """
    task = of_zoo(name)
    batch, length = task.batch(), task.batch()["input_ids"].shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril().expand(batch["input_ids"].shape[0], 1, -1, -1)
    return replace(task, batch=lambda: {**batch, "attention_mask": mask.clone()})


TASKS: dict[str, Callable[[], Task]] = {
    "GPT-2": lambda: of_transformers("GPT-2"),
    "Llama": lambda: of_transformers("Llama"),
    "dropout": lambda: Task(LanguageModel, ids),
}
PINS = {"dropout": Constraints(pin_recompute=("**/aten.native_dropout*",))}


class Loop:
    """A training loop over batches of one shape, in static tensors."""

    def __init__(self, name: str, *, to_none: bool = True) -> None:
        self.model, _, self.batch = TASKS[name]().made()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False, capturable=True)
        self.to_none = to_none
        self.loss: Tensor | None = None  # of the last step, as in most loops
        torch.manual_seed(5)

    def load(self, i: int) -> None:
        for value in self.batch.values():
            if value.dtype is torch.bool:
                continue
            fresh = torch.randint(2, 30, value.shape, generator=torch.Generator().manual_seed(i))
            value.copy_(fresh)

    def step(self, *, updates: bool = True) -> Tensor:
        self.optimizer.zero_grad(set_to_none=self.to_none)
        loss: Tensor = self.model(**self.batch)["loss"]
        loss.backward()
        if updates:
            self.optimizer.step()
        self.loss = loss.detach()
        return self.loss

    def warm_up(self, steps: int, run: Training) -> None:
        """Run some steps on a side stream, as torch's documentation does before a capture."""
        side = torch.cuda.Stream()
        for i in range(steps):
            self.load(i)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = self.step()
            torch.cuda.current_stream().wait_stream(side)
            run.losses.append(loss.cpu())

    def capture(self, *, updates: bool = True) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.step(updates=updates)
        return graph, loss

    def finish(self, run: Training) -> Training:
        run.state = [t.detach().cpu() for t in (*self.model.parameters(), *self.model.buffers())]
        run.generators = [torch.cuda.get_rng_state()]
        return run


@functools.cache
def eager(name: str, **options: bool) -> Training:
    """Train the plain model."""
    loop, run = Loop(name, **options), Training(None)
    for i in range(WARM_UP + REPLAYS):
        loop.load(i)
        run.losses.append(loop.step().cpu())
    return loop.finish(run)


@functools.cache
def budget_of(name: str, *, to_none: bool = True) -> int:
    """Return a budget near the smallest peak found."""
    loop = Loop(name)
    if not to_none:
        loop.step()
    known = bounds(build(observe(loop.model, (), loop.batch, optimizer=loop.optimizer)))
    return int(known.floor + 0.2 * (known.ceiling - known.floor))


def planned(name: str, budget: int, **options: bool) -> Loop:
    loop = Loop(name, **options)
    limits: dict[str, Any] = {"constraints": PINS.get(name), "host_budget_gb": 0}
    ac_client.apply(loop.model, budget / GIB, optimizer=loop.optimizer, **limits)
    return loop


def replayed(gpu: ModuleType, name: str, budget: int, warm_up: int = WARM_UP, **options: bool) -> Training:
    """Train a planned model: eager steps, and then replays of a captured one."""
    loop = planned(name, budget, **options)
    run = Training(ac_client.applied(loop.model))
    loop.warm_up(warm_up, run)
    gpu.reset_peak(0)
    graph, loss = loop.capture()
    run.peaks.append(gpu.peak(0))
    for i in range(warm_up, WARM_UP + REPLAYS):
        loop.load(i)
        graph.replay()
        run.losses.append(loss.cpu())
    return loop.finish(run)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("to_none", [True, False], ids=["freed gradients", "kept gradients"])
def test_replays_equal_eager_steps_and_the_capture_has_the_predicted_peak(
    gpu: ModuleType, name: str, to_none: bool
) -> None:
    budget = budget_of(name, to_none=to_none)
    run = replayed(gpu, name, budget, to_none=to_none)
    report = run.applied.report()
    assert report.off_path == ""
    assert report.recomputed > 0
    assert report.predicted_peak_bytes == run.peaks[0] <= budget
    assert run.same_numbers(eager(name, to_none=to_none))


def test_optimizer_may_step_outside_of_the_graph(gpu: ModuleType) -> None:
    loop, run = planned("dropout", budget_of("dropout")), Training(None)
    loop.warm_up(WARM_UP, run)
    graph, loss = loop.capture(updates=False)
    for i in range(WARM_UP, WARM_UP + REPLAYS):
        loop.load(i)
        graph.replay()
        loop.optimizer.step()
        run.losses.append(loss.cpu())
    assert loop.finish(run).same_numbers(eager("dropout"))


def test_replays_find_an_input_that_was_freed(gpu: ModuleType) -> None:
    loop = planned("dropout", budget_of("dropout"))
    loop.warm_up(WARM_UP, Training(None))
    graph, loss = loop.capture()
    graph.replay()
    assert not loss.isnan()
    loop.batch.clear()
    graph.replay()
    assert loss.isnan()
    assert "was freed after the capture" in gpu.take_races()[0]


def test_capture_that_comes_too_early_is_refused_before_anything_is_captured(gpu: ModuleType) -> None:
    loop = planned("dropout", budget_of("dropout"))
    with pytest.raises(CannotCapture, match="its plan is not made yet"):
        loop.capture()
    loop.warm_up(WARM_UP, Training(None))
    graph, loss = loop.capture()
    graph.replay()
    assert not loss.isnan()


def test_plan_must_be_compared_before_a_capture_also_that_for_gradients(gpu: ModuleType) -> None:
    loop = planned("dropout", budget_of("dropout"))
    loop.warm_up(1, Training(None))
    assert ac_client.applied(loop.model).policy is not None  # makes the plan now
    with pytest.raises(CannotCapture, match="has not yet compared"):
        loop.capture()
    loop.warm_up(1, Training(None))
    loop.to_none = False  # gradients stay from here on
    with pytest.raises(CannotCapture, match="has not yet compared"):
        loop.capture()


def test_plan_that_moves_to_the_host_is_refused_in_a_capture(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = LinkRates(out_bytes_per_us=1e6, in_bytes_per_us=1e6, latency_us=0.0)
    monkeypatch.setattr(host_budget, "link_of", lambda _: rates)  # that of a busy machine is too slow
    loop = Loop("dropout")
    moves = Constraints(host_budget_bytes=1 << 20)
    ac_client.apply(loop.model, budget_of("dropout") / GIB, optimizer=loop.optimizer, constraints=moves)
    loop.warm_up(WARM_UP, Training(None))
    policy = ac_client.applied(loop.model).policy
    assert policy.moves
    with pytest.raises(CannotCapture, match="host_budget_gb=0"):
        loop.capture()


def test_another_model_is_planned_beside_the_pool_of_a_graph(gpu: ModuleType) -> None:
    def static() -> int:
        loop = planned("dropout", 1 << 30)
        loop.warm_up(2, Training(None))
        policy = ac_client.applied(loop.model).policy
        return policy.predicted.static_bytes

    x, graph, alone = torch.ones(2 << 20, device="cuda"), torch.cuda.CUDAGraph(), static()
    with torch.cuda.graph(graph):
        total = (x + 1).sum()  # the graph's pool keeps the 8 MiB of the sum's operand
    kept = pool_nbytes(torch.device("cuda", 0))
    assert kept >= 8 << 20
    assert static() == alone + kept + 512  # and the sum
    del total
