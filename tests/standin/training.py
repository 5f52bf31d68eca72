"""Run a few training steps on the stand-in, and collect their results and peaks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from waiting import engine_lets_go

import ac_client
from autoac.planner.units import GIB
from autoac.profiler import observe


@dataclass
class Task:
    """A model that returns its loss, its batch, and the device of both."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Mapping[str, Any]]
    device: str = "cuda:0"
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # of forward
    foreach: bool = False  # steps the optimizer on all parameters at once, torch's default on CUDA

    @property
    def index(self) -> int:
        return int(self.device[-1])

    def made(self) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        """Return the model, its optimizer and its batch; nothing else stays on the device."""
        gc.collect()
        torch.manual_seed(0)
        model = self.make().train().to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=self.foreach)
        batch = {
            name: value.detach().to(self.device) if isinstance(value, Tensor) else value
            for name, value in self.batch().items()
        }
        return model, optimizer, batch

    def observed(self, **options: Any) -> Any:
        """Return the profile of a step."""
        model, optimizer, batch = self.made()
        with self.context():
            return observe(model, (), batch, optimizer=optimizer, **options)


@dataclass
class Training:
    """Results of some training steps."""

    applied: ac_client.Applied | None
    peaks: list[int] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    gradients: list[list[Tensor]] = field(default_factory=list)
    state: list[Tensor] = field(default_factory=list)  # parameters and buffers
    generators: list[Tensor] = field(default_factory=list)  # states of the host's and the devices' generators

    def same_numbers(self, other: Training) -> bool:
        """Return True if losses, gradients, the model's state and generators' are equal, bit for bit."""
        mine, theirs = (
            [*one.losses, *(g for step in one.gradients for g in step), *one.state, *one.generators]
            for one in (self, other)
        )
        return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def train(gpu: ModuleType, task: Task, budget: int | None = None, steps: int = 4, **options: Any) -> Training:
    """Train `task` for some steps, planned with `options` of `apply` if there is a budget in bytes.

    The first step is observed, and the second one, the first that is planned, also compares contents.
    """
    model, optimizer, batch = task.made()
    if budget is not None:
        ac_client.apply(model, budget / GIB, **{"optimizer": optimizer, **options})
    done = Training(ac_client.applied(model) if budget is not None else None)
    for i in range(steps):
        torch.manual_seed(i)
        gpu.reset_peak(task.index)
        step(task, model, optimizer, batch, done)
        done.peaks.append(gpu.peak(task.index))
        engine_lets_go(task.device)
    done.state = [t.detach().cpu().clone() for t in (*model.parameters(), *model.buffers())]
    done.generators = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    return done


def step(
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any], done: Training
) -> None:
    """Run one step. Its outputs live to the end, as in a loop that runs each step in a function."""
    with task.context():
        out = model(**batch)
    out["loss"].backward()
    optimizer.step()
    done.losses.append(out["loss"].detach().cpu())
    done.gradients.append([p.grad.cpu().clone() for p in model.parameters() if p.grad is not None])
    optimizer.zero_grad()
