"""Measure a row of the demo: one way to train its model, in a process of its own.

A row is measured in three parts:

1. *first steps* (ours only): `ac_client.apply` on a new model. The first step is observed: it runs without a
   plan, and its record is the profile. The second is planned, and runs under the plan.
2. *memory*: a new model under the allocator's own report, which starts before the model is built, so that
   it counts every byte. Ours runs under the policy of part 1, since only one torch profiler can be active.
3. *time*: the model takes one step each time that the row's turn comes.

Each step has a digest of its loss and gradients, and the n-th step the same seed in every row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ac_client
from ac_client.demo.setting import Setting
from ac_client.measure.memory_timeline import AllocatorTimeline, LiveBytes
from autoac.planner import Policy, Profile

NAMES = {"plain": "plain", "checkpoint": "checkpoint every block", "ours": "autoac"}  # by method
FIRST_STEPS = 2
MEMORY_STEPS = 2  # a warm-up step and the measured one


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train the demo's model; a row of the demo's table."""

    method: str  # "plain", "ours", or a wrapper of the blocks such as "checkpoint"
    budget_bytes: int | None = None  # of ours

    @property
    def name(self) -> str:
        """Return the name of the row."""
        return NAMES.get(self.method, self.method)


@dataclass(frozen=True, slots=True)
class Step:
    """One training step: its CPU time in seconds, and a digest of its loss and gradients."""

    cpu_s: float
    digest: bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """Hold what was measured before the timed steps: parts 1 and 2."""

    peak_bytes: int  # of the second step
    first_steps: tuple[Step, ...] = ()  # of ours: the observed step; the plan, and the step under it
    steps: tuple[Step, ...] = ()  # of part 2
    timeline: list[tuple[float, int]] = field(default_factory=list)  # (ms, live bytes) of the last step
    policy: Policy | None = None  # of ours, with the profile that it was planned from
    profile: Profile | None = None


Wrappers = Mapping[str, Callable[[Iterable[nn.Module]], None]]
"""Functions that change how blocks run, by the method of a row."""


def checkpoint_blocks(blocks: Iterable[nn.Module]) -> None:
    """Run every block's forward under torch's non-reentrant checkpoint."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


class Trainee:
    """A model in training, with its optimizer and the demo's batch."""

    def __init__(self, setting: Setting) -> None:
        self.model = setting.build()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)  # it has no state
        self.inputs = setting.inputs()
        self.setting = setting
        self.taken = 0  # steps
        if setting.keep_gradients:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)

    def step(self) -> Step:
        """Take a training step."""
        self.taken += 1
        torch.manual_seed(self.setting.seed + self.taken)
        start = time.process_time()  # other processes do not add to it
        out = self.model(**self.inputs)
        loss = out if isinstance(out, Tensor) else out.loss
        loss.backward()
        self.optimizer.step()
        cpu_s = time.process_time() - start
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        result = sha256()
        for tensor in (loss, *gradients):
            result.update(tensor.detach().numpy().tobytes())
        self.optimizer.zero_grad(set_to_none=not self.setting.keep_gradients)
        return Step(cpu_s, result.digest())


def measure(
    row: Row, setting: Setting, wrappers: Wrappers | None = None, policy: Policy | None = None
) -> Iterator[Memory | Step]:
    """Train the demo's model as `row` says, in this process; yield its memory, then step after step.

    With `policy`, ours runs under it and has no first steps.
    """
    first: list[Step] = []
    profile = None
    if row.method == "ours" and policy is None:
        trainee = Trainee(setting)
        _apply(trainee, row)
        first = [trainee.step() for _ in range(FIRST_STEPS)]
        plan = ac_client.applied(trainee.model).plan
        assert plan is not None
        policy, profile = plan.policy(), plan.profile
        del trainee

    with AllocatorTimeline() as timeline:
        mine = Trainee(setting)
        if row.method == "ours":
            _apply(mine, row, policy)
        elif row.method != "plain":
            (wrappers or {"checkpoint": checkpoint_blocks})[row.method](setting.blocks(mine.model))
        steps = []
        for number in range(1, MEMORY_STEPS + 1):
            timeline.mark(f"step {number}")
            steps.append(mine.step())

    last = since(timeline.events, timeline.marks[f"step {MEMORY_STEPS}"])
    yield Memory(timeline.peak_since("step 2"), tuple(first), tuple(steps), last, policy, profile)
    while True:
        yield mine.step()


def _apply(trainee: Trainee, row: Row, policy: Policy | None = None) -> None:
    assert row.budget_bytes is not None
    ac_client.apply(trainee.model, row.budget_bytes / 2**30, optimizer=trainee.optimizer, policy=policy)


def since(events: Iterable[LiveBytes], start: LiveBytes) -> list[tuple[float, int]]:
    """Return the curve of live bytes from `start` on, as pairs of (ms after `start`, bytes)."""
    changes = [start, *(event for event in events if event.time_ns >= start.time_ns)]
    return [(round((change.time_ns - start.time_ns) / 1e6, 3), change.live_bytes) for change in changes]
