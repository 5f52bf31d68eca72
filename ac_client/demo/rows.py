"""Measure rows of the demo: one way to train its model, in one process.

A row is measured in three parts:

1. *first steps* (ours only): `ac_client.apply` on a new model. The first step is observed: it runs without a
   plan, and its record is the profile. The second is planned, and runs under the plan.
2. *memory*: a new model under the allocator's own report, which starts before the model is built, so that
   it counts every byte. Ours runs under the policy of part 1, since only one torch profiler can be active.
3. *time*: a plain copy takes the same steps from the same seeds, then both take steps in turn.

Loss and gradients are compared with those of the plain copy at every step of all three parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from statistics import median

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ac_client
from ac_client.demo import setting as demo_setting
from ac_client.demo.setting import Setting
from ac_client.measure.memory_timeline import AllocatorTimeline, LiveBytes
from autoac.planner import Policy, Profile
from autoac.planner.report.align_measured import thin_out

FIRST_STEPS = 2
MEMORY_STEPS = 2  # a warm-up step and the measured one
TIMELINE_POINTS = 700


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train the demo's model; a row of the demo's table."""

    name: str
    method: str  # "plain", "ours", or a wrapper of the blocks such as "checkpoint"
    budget_bytes: int | None = None  # of ours
    pairs: int = 5  # timed steps, each paired with a plain one


@dataclass(frozen=True, slots=True)
class Measured:
    """Peaks and times that were measured for one row. Times are medians in seconds, sizes are in bytes."""

    peak_bytes: int  # from the second step on
    first_steps_s: tuple[float, float] | None  # of ours: the observed step; the plan, and the step under it
    step_s: float
    slowdown: float  # median over the pairs of step / plain step
    gradients_equal: bool  # loss and gradients equal those of plain bit for bit at every step
    compared_steps: int
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
        self.model = demo_setting.build_model(setting)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)  # it has no state
        self.ids = demo_setting.make_batch(setting)
        self.seed = setting.seed
        self.keep_gradients = setting.keep_gradients
        if self.keep_gradients:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        self.seconds: list[float] = []  # of each step
        self.results: list[bytes] = []  # SHA-256 of each step's loss and gradients

    def step(self) -> None:
        """Take a training step, and keep its seconds and its result."""
        torch.manual_seed(self.seed + len(self.seconds) + 1)
        start = time.perf_counter()
        out = self.model(self.ids, labels=self.ids)
        out.loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        result = sha256()
        for tensor in (out.loss, *gradients):
            result.update(tensor.detach().numpy().tobytes())
        self.results.append(result.digest())
        self.optimizer.zero_grad(set_to_none=not self.keep_gradients)


def measure(row: Row, setting: Setting, wrappers: Wrappers | None = None) -> Measured:
    """Train the demo's model as `row` says, in this process, and measure its peak and its step time."""
    first: Trainee | None = None
    policy = profile = None
    if row.method == "ours":
        first = Trainee(setting)
        _apply(first, row)
        for _ in range(FIRST_STEPS):
            first.step()
        plan = ac_client.applied(first.model).plan
        assert plan is not None
        policy, profile = plan.policy(), plan.profile
        del first.model, first.optimizer

    with AllocatorTimeline() as timeline:
        mine = Trainee(setting)
        if row.method == "ours":
            _apply(mine, row, policy)
        elif row.method != "plain":
            (wrappers or {"checkpoint": checkpoint_blocks})[row.method](
                demo_setting.blocks(mine.model, setting)
            )
        for number in range(1, MEMORY_STEPS + 1):
            timeline.mark(f"step {number}")
            mine.step()

    plain = mine
    if row.method != "plain":
        plain = Trainee(setting)
        for _ in range(MEMORY_STEPS):
            plain.step()
    for i in range(row.pairs):
        for trainee in dict.fromkeys((mine, plain) if i % 2 else (plain, mine)):
            trainee.step()
    ran, ran_plain = mine.seconds[MEMORY_STEPS:], plain.seconds[MEMORY_STEPS:]
    compared = [] if mine is plain else list(zip(mine.results, plain.results, strict=True))
    first_steps_s = None
    if first is not None:
        first_steps_s = first.seconds[0], first.seconds[1]
        compared += zip(first.results, plain.results[:FIRST_STEPS], strict=True)
    return Measured(
        peak_bytes=timeline.peak_since("step 2"),
        first_steps_s=first_steps_s,
        step_s=median(ran),
        slowdown=median(a / b for a, b in zip(ran, ran_plain, strict=True)),
        gradients_equal=all(a == b for a, b in compared),
        compared_steps=len(compared),
        timeline=since(timeline.events, timeline.marks[f"step {MEMORY_STEPS}"], TIMELINE_POINTS),
        policy=policy,
        profile=profile,
    )


def _apply(trainee: Trainee, row: Row, policy: Policy | None = None) -> None:
    assert row.budget_bytes is not None
    ac_client.apply(trainee.model, row.budget_bytes / 2**30, optimizer=trainee.optimizer, policy=policy)


def since(events: Iterable[LiveBytes], start: LiveBytes, points: int) -> list[tuple[float, int]]:
    """Return the curve of live bytes from `start` on, as about `points` pairs (ms after `start`, bytes)."""
    changes = [start, *(event for event in events if event.time_ns >= start.time_ns)]
    chosen = thin_out([change.live_bytes for change in changes], points)
    return [(round((changes[i].time_ns - start.time_ns) / 1e6, 3), changes[i].live_bytes) for i in chosen]
