"""Measures rows of the demo, each in a process of its own: `python -m ac_client.demo.child` (rows.py).

Three stretches:

1. *one line* (ours only): `ac_client.apply` on a new model; its first step is profiled, planned, and
   runs planned.
2. *memory*: a new model under PyTorch's own report of the allocator, from before it is built, so that the
   report counts every byte. Ours carries out the policy of stretch 1: profiling needs torch's profiler
   for itself, so the report cannot be on while `apply` profiles.
3. *time*: a plain copy takes the same steps from the same seeds, then both take steps in turn. Gradients
   are compared with the plain copy's at every step of all three stretches.
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
from torch import Tensor

from ac_client.demo import setting as demo_setting
from ac_client.demo.baselines import BASELINES, replayed_us, wrap_blocks
from ac_client.demo.rows import Measured, Row, policy_path, profile_path
from ac_client.demo.setting import Setting, block_paths
from ac_client.measure.memory_timeline import AllocatorTimeline, LiveBytes
from autoac.planner.report.align_measured import thin_out

MEMORY_STEPS = 2  # one that warms up, one that is measured
TIMELINE_POINTS = 700
_PR_SET_PDEATHSIG = 1


class Trainee:
    """A model in training, with its optimizer, on the demo's batch."""

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
        self.loss: Any = None  # of the last step, outside of torch's allocator

    def step(self) -> float:
        """One step of training; returns its seconds. The gradients stay until `zero_grad`."""
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
        """The loss and the gradients of the last step."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [torch.from_numpy(self.loss), *gradients]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.keep_gradients)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step computed, copied out of torch's allocator."""

    tensors: list[Tensor]  # the loss and the gradients

    @classmethod
    def of(cls, trainee: Trainee) -> Outcome:
        return cls([torch.from_numpy(_copy(tensor)) for tensor in trainee.computed()])

    def equals(self, trainee: Trainee) -> bool:
        """Bit for bit."""
        return all(_same_bits(a, b) for a, b in zip(self.tensors, trainee.computed(), strict=True))


def _copy(tensor: Tensor) -> Any:
    return tensor.numpy(force=True).copy()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))  # 0.0 and -0.0 differ, a NaN equals itself


def measure(row: Row, setting: Setting, folder: Path) -> Measured:
    """All that the demo wants to know of `row`."""
    outcomes: list[tuple[int, Outcome]] = []  # (number of steps taken, what the last one computed)
    policy = None
    plan_s = gap = predicted = own_us = None
    own_baselines_us: dict[str, float] = {}
    if row.method == "ours":
        import ac_client

        assert row.budget_bytes is not None
        trainee = Trainee(setting)
        ac_client.apply(trainee.model, row.budget_bytes / 2**30, optimizer=trainee.optimizer)
        with _timed_planning() as planning:
            trainee.step()
        outcomes.append((1, Outcome.of(trainee)))
        applied = ac_client.applied(trainee.model)
        policy, plan = applied.policy, applied.plan
        assert policy is not None
        assert plan is not None
        assert plan.profile is not None
        own_us = plan.recompute_us
        own_baselines_us = {b: replayed_us(plan.profile, block_paths(setting), b) for b in BASELINES}
        predicted, gap, plan_s = policy.predicted.peak_bytes, policy.predicted.gap, sum(planning)
        policy_path(folder, row.name).write_text(policy.to_json())
        del trainee, applied, plan

    with AllocatorTimeline() as timeline:
        trainee = Trainee(setting)
        _prepare(row, setting, trainee, policy)
        for number in range(1, MEMORY_STEPS + 1):
            timeline.mark(f"step {number}")
            trainee.step()
            outcomes.append((number, Outcome.of(trainee)))
            trainee.zero_grad()

    if row.method == "plain":
        predicted = _profile(trainee, profile_path(folder))
        seconds = [_timed(trainee) for _ in range(row.pairs)]
        pairs = [(s, s) for s in seconds]
        equal, compared = True, 0
    else:
        plain = Trainee(setting)
        equal = _replay(plain, outcomes)
        pairs, pairs_equal = _pairs(trainee, plain, row.pairs)
        equal, compared = equal and pairs_equal, len(outcomes) + len(pairs)
    return Measured(
        peak_bytes=timeline.peak_since("step 2"),
        first_step_peak_bytes=max(
            event.live_bytes for event in timeline.events if event.time_ns < timeline.marks["step 2"].time_ns
        ),
        predicted_peak_bytes=predicted,
        step_s=median(mine for mine, _ in pairs),
        plain_step_s=median(plain for _, plain in pairs),
        slowdown=median(mine / plain for mine, plain in pairs),
        gradients_equal=equal,
        compared_steps=compared,
        plan_s=plan_s,
        gap=gap,
        own_recompute_us=own_us,
        own_baselines_us=own_baselines_us,
        timeline=since(timeline.events, timeline.marks[f"step {MEMORY_STEPS}"], TIMELINE_POINTS),
    )


@contextmanager
def _timed_planning() -> Iterator[list[float]]:
    """The seconds of each call of the planner inside; the client itself keeps no such clock."""
    module: Any = sys.modules["ac_client.planning.plan_batch"]
    plan, seconds = module.plan, []

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return plan(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    module.plan = timed
    try:
        yield seconds
    finally:
        module.plan = plan


def _prepare(row: Row, setting: Setting, trainee: Trainee, policy: Any) -> None:
    match row.method:
        case "plain":
            pass
        case "checkpoint" | "selective":
            wrap_blocks(demo_setting.blocks(trainee.model, setting), row.method)
        case "ours":
            import ac_client

            assert row.budget_bytes is not None
            gb = row.budget_bytes / 2**30
            ac_client.apply(trainee.model, gb, optimizer=trainee.optimizer, policy=policy)


def _profile(trainee: Trainee, path: Path) -> int:
    """Write the model's profile; returns the peak that it predicts with nothing recomputed."""
    from autoac.planner.memory.simulate import peak_bytes
    from autoac.planner.problem.build import build
    from autoac.profiler import observe

    profile = observe(trainee.model, (trainee.ids,), {"labels": trainee.ids}, optimizer=trainee.optimizer)
    path.write_text(profile.to_json())
    graph = build(profile)
    return peak_bytes(graph, graph.everything)


def _replay(plain: Trainee, outcomes: list[tuple[int, Outcome]]) -> bool:
    """Take the steps behind `outcomes` with the plain model; whether all were equal."""
    equal = True
    for number in range(1, max(number for number, _ in outcomes) + 1):
        plain.step()
        equal &= all(outcome.equals(plain) for at, outcome in outcomes if at == number)
        plain.zero_grad()
    return equal


def _pairs(mine: Trainee, plain: Trainee, n: int) -> tuple[list[tuple[float, float]], bool]:
    """Seconds of `n` pairs of steps, and whether their gradients were equal. Who goes first alternates."""
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
    """Some `points` changes since `start`, as (ms, bytes): the highest and the last of each stretch."""
    changes = [start, *(event for event in events if event.time_ns >= start.time_ns)]
    kept = thin_out([change.live_bytes for change in changes], points)
    return [(round((changes[i].time_ns - start.time_ns) / 1e6, 3), changes[i].live_bytes) for i in kept]


def main() -> None:
    """Fork a process for each order on stdin; say on stdout with which exit code it ended."""
    _end_with(os.getppid())
    importlib.import_module("transformers.models.gpt2.modeling_gpt2")  # once, for all of them
    for line in sys.stdin:
        server = os.getpid()
        pid = os.fork()
        if not pid:
            _end_with(server)
            _carry_out(json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _end_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)


def _carry_out(order: dict[str, Any]) -> NoReturn:
    """Measure, write the result, and end this process."""
    code = 1
    try:
        measured = measure(Row(**order["row"]), Setting(**order["setting"]), Path(order["folder"]))
        Path(order["result"]).write_text(json.dumps(asdict(measured)))
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it was, the parent shows it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
