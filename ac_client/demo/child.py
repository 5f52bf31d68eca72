"""Measure rows of the demo, each in a fork of this process: `python -m ac_client.demo.child` (rows.py).

A row is measured in three parts:

1. *first step* (ours only): `ac_client.apply` on a new model. Its first step is profiled, planned, and runs
   under the plan.
2. *memory*: a new model under the allocator's own report, which starts before the model is built, so that
   it counts every byte. Ours runs under the policy of part 1, since only one torch profiler can be active.
3. *time*: a plain copy takes the same steps from the same seeds, then both take steps in turn.

Gradients are compared with those of the plain copy at every step of all three parts.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ac_client
from ac_client.demo import setting as demo_setting
from ac_client.demo.rows import Measured, Row, policy_path, profile_path
from ac_client.demo.setting import Setting
from ac_client.measure.memory_timeline import AllocatorTimeline, LiveBytes
from autoac.planner import Policy
from autoac.planner.report.align_measured import thin_out

MEMORY_STEPS = 2  # a warm-up step and the measured one
TIMELINE_POINTS = 700
_PR_SET_PDEATHSIG = 1

Wrappers = Mapping[str, Callable[[Iterable[nn.Module]], None]]
"""Functions that change how blocks run, by the method of a row."""


def checkpoint_blocks(blocks: Iterable[nn.Module]) -> None:
    """Run every block's forward under torch's non-reentrant checkpoint."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


WRAPPERS: Wrappers = {"checkpoint": checkpoint_blocks}


class Trainee:
    """A model in training, with its optimizer and the demo's batch."""

    def __init__(self, setting: Setting) -> None:
        self.model = demo_setting.build_model(setting)
        self.optimizer = demo_setting.build_optimizer(self.model)
        self.ids = demo_setting.make_batch(setting)
        self.seed = setting.seed
        self.keep_gradients = setting.keep_gradients
        if self.keep_gradients:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        self.steps = 0
        self.loss: Any = None  # of the last step, as a numpy array outside of torch's allocator

    def step(self) -> float:
        """Take a training step and return its seconds. The gradients stay until `zero_grad`."""
        self.steps += 1
        torch.manual_seed(self.seed + self.steps)
        start = time.perf_counter()
        out = self.model(self.ids, labels=self.ids)
        out.loss.backward()
        self.optimizer.step()
        seconds = time.perf_counter() - start
        self.loss = _copy(out.loss)
        return seconds

    def computed(self) -> list[Tensor]:
        """Return the loss and the gradients of the last step."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [torch.from_numpy(self.loss), *gradients]

    def zero_grad(self) -> None:
        """Fill the gradients with zeros if the setting keeps them between steps, else free them."""
        self.optimizer.zero_grad(set_to_none=not self.keep_gradients)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Loss and gradients of a step, copied out of torch's allocator."""

    tensors: list[Tensor]

    @classmethod
    def of(cls, trainee: Trainee) -> StepResult:
        """Copy the result of the trainee's last step."""
        return cls([torch.from_numpy(_copy(tensor)) for tensor in trainee.computed()])

    def equals(self, trainee: Trainee) -> bool:
        """Return True if loss and gradients of the trainee's last step equal these, bit for bit."""
        return all(_same_bits(a, b) for a, b in zip(self.tensors, trainee.computed(), strict=True))


def _copy(tensor: Tensor) -> Any:
    return tensor.numpy(force=True).copy()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))  # 0.0 and -0.0 differ, a NaN equals itself


def measure(row: Row, setting: Setting, folder: Path, wrappers: Wrappers = WRAPPERS) -> Measured:
    """Train the demo's model as `row` says, in this process, and measure its peak and its step time."""
    results: list[tuple[int, StepResult]] = []  # (number of steps taken, result of the last one)
    policy = first_step_s = None
    if row.method == "ours":
        trainee = Trainee(setting)
        _apply(trainee, row)
        first_step_s = trainee.step()
        results.append((1, StepResult.of(trainee)))
        policy = _save_plan(trainee, row, folder)
        del trainee

    with AllocatorTimeline() as timeline:
        trainee = Trainee(setting)
        if row.method == "ours":
            _apply(trainee, row, policy)
        elif row.method != "plain":
            wrappers[row.method](demo_setting.blocks(trainee.model, setting))
        for number in range(1, MEMORY_STEPS + 1):
            timeline.mark(f"step {number}")
            trainee.step()
            results.append((number, StepResult.of(trainee)))
            trainee.zero_grad()

    if row.method == "plain":
        pairs = [(seconds, seconds) for seconds in (_timed(trainee) for _ in range(row.pairs))]
        equal, compared = True, 0
    else:
        plain = Trainee(setting)
        equal = _replay(plain, results)
        pairs, pairs_equal = _pairs(trainee, plain, row.pairs)
        equal, compared = equal and pairs_equal, len(results) + len(pairs)
    start = timeline.marks["step 2"].time_ns
    return Measured(
        peak_bytes=timeline.peak_since("step 2"),
        first_step_peak_bytes=max(event.live_bytes for event in timeline.events if event.time_ns < start),
        predicted_peak_bytes=None if policy is None else policy.predicted.peak_bytes,
        first_step_s=first_step_s,
        step_s=median(mine for mine, _ in pairs),
        plain_step_s=median(plain for _, plain in pairs),
        slowdown=median(mine / plain for mine, plain in pairs),
        gradients_equal=equal,
        compared_steps=compared,
        timeline=since(timeline.events, timeline.marks[f"step {MEMORY_STEPS}"], TIMELINE_POINTS),
    )


def _apply(trainee: Trainee, row: Row, policy: Policy | None = None) -> None:
    assert row.budget_bytes is not None
    ac_client.apply(trainee.model, row.budget_bytes / 2**30, optimizer=trainee.optimizer, policy=policy)


def _save_plan(trainee: Trainee, row: Row, folder: Path) -> Policy:
    """Write the policy that the trainee runs under, and the profile that it was planned from."""
    applied = ac_client.applied(trainee.model)
    assert applied.policy is not None
    assert applied.plan is not None
    assert applied.plan.profile is not None
    policy_path(folder, row.name).write_text(applied.policy.to_json())
    profile_path(folder, row.name).write_text(applied.plan.profile.to_json())
    return applied.policy


def _replay(plain: Trainee, results: list[tuple[int, StepResult]]) -> bool:
    """Take the steps of `results` with the plain model; return True if all results are equal."""
    equal = True
    for number in range(1, max(number for number, _ in results) + 1):
        plain.step()
        equal &= all(result.equals(plain) for at, result in results if at == number)
        plain.zero_grad()
    return equal


def _pairs(mine: Trainee, plain: Trainee, n: int) -> tuple[list[tuple[float, float]], bool]:
    """Time `n` pairs of steps, alternating the order; return the seconds, and True if gradients are equal."""
    pairs, equal = [], True
    for i in range(n):
        seconds = {trainee: trainee.step() for trainee in ((mine, plain) if i % 2 else (plain, mine))}
        pairs.append((seconds[mine], seconds[plain]))
        equal &= all(_same_bits(a, b) for a, b in zip(mine.computed(), plain.computed(), strict=True))
        mine.zero_grad()
        plain.zero_grad()
    return pairs, equal


def _timed(trainee: Trainee) -> float:
    seconds = trainee.step()
    trainee.zero_grad()
    return seconds


def since(events: Iterable[LiveBytes], start: LiveBytes, points: int) -> list[tuple[float, int]]:
    """Return the curve of live bytes from `start` on, as pairs (ms after `start`, bytes).

    To have about `points` pairs, cut the time into intervals and take the highest and the last value of each.
    """
    changes = [start, *(event for event in events if event.time_ns >= start.time_ns)]
    chosen = thin_out([change.live_bytes for change in changes], points)
    return [(round((changes[i].time_ns - start.time_ns) / 1e6, 3), changes[i].live_bytes) for i in chosen]


def main(wrappers: Wrappers = WRAPPERS) -> None:
    """Fork a process for each order on stdin; print its exit code on stdout."""
    _end_with(os.getppid())
    importlib.import_module("transformers.models.gpt2.modeling_gpt2")  # once, for all rows
    for line in sys.stdin:
        server = os.getpid()
        pid = os.fork()
        if not pid:
            _end_with(server)
            _run_order(json.loads(line), wrappers)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends for any reason; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)


def _run_order(order: dict[str, Any], wrappers: Wrappers) -> NoReturn:
    """Measure a row, write the result, and end this process."""
    code = 1
    try:
        measured = measure(Row(**order["row"]), Setting(**order["setting"]), Path(order["folder"]), wrappers)
        Path(order["result"]).write_text(json.dumps(asdict(measured)))
        code = 0
    except BaseException:  # noqa: BLE001 - the parent shows every error
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
