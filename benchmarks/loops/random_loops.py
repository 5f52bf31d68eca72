"""Training loops drawn from a seed, each planned at a budget that checkpoints around all blocks keep.

    python -m benchmarks.loops --random 150 | --seeds 7 9 [--on cpu|standin]

A loop is drawn from: the lengths of its batches, accumulation, forwards in flight, the passes of a backward,
parts on the device, the place of zero_grad, the optimizer, and what else is on the device. It runs plainly,
with torch's checkpoint around each block, and planned at a budget between these two peaks. So a plan exists
that keeps the budget.
"""

from __future__ import annotations

import copy
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from benchmarks.loops.runs import Meter, Row, Run, judged
from benchmarks.loops.written_loops import WIDTH, Block, Env

BATCH, OUT = 4, 16
LENGTHS = {"fixed": (64,), "two": (64, 32), "three": (64, 32, 48), "random": ()}
RANDOM = range(24, 80)
PASSES = ("adaptive", "early", "retained", "batched", "engine", "thread")
PLAIN = 0.55  # the chance that a dimension is that of the simplest loop


@dataclass(frozen=True, slots=True)
class RandomLoop:
    """A training loop. The defaults are those of the simplest one."""

    seed: int
    lengths: str = "fixed"
    accumulates: int = 1
    order: str = "one"  # of forwards and backwards of a round; "list": one backward of all losses
    in_flight: int = 1
    passes: str = "one"  # of a backward
    parts: str = "one model"
    zeroes: str = "after step"
    to_none: bool = True
    optimizer: str = "AdamW"
    passed: bool = True  # the optimizer, to `apply`
    other: str = "nothing"  # on the device
    drop: float = 0.0
    share: float = 0.5  # of the way from the checkpoints' peak to plain's, for the budget
    checkpoints: bool = False

    def __str__(self) -> str:
        names = (f.name for f in fields(self) if getattr(self, f.name) != f.default)
        hidden = ("seed", "share", "checkpoints")
        return f"{self.seed}: " + ", ".join(f"{n} {getattr(self, n)}" for n in names if n not in hidden)

    @property
    def microbatches(self) -> int:
        """Return how many forwards a step has."""
        return self.accumulates * (self.in_flight + 2 * (self.order == "1F1B"))

    @property
    def period(self) -> int | None:
        """Return after how many steps the loop repeats; None if never."""
        n = len(LENGTHS[self.lengths])
        return n // math.gcd(n, self.microbatches) if n else None

    @property
    def steps(self) -> int:
        return 8 if self.period is None else 4 * self.period + 2

    def __call__(self, env: Env) -> None:
        training = Training(self, env)
        for i in env.steps():
            with env.step():
                training.step(i)


def drawn(seed: int) -> RandomLoop:
    """Return the loop of a seed."""
    chance = random.Random(seed)

    def draw(plain: Any, others: Sequence[Any]) -> Any:
        return plain if chance.random() < PLAIN else chance.choice(others)

    in_flight = draw(1, (2, 3, 4))
    loop = RandomLoop(
        seed,
        lengths=draw("fixed", ("two", "three", "random")),
        accumulates=draw(1, (2, 3, 4)),
        order=chance.choice(("list", "GPipe", "1F1B")) if in_flight > 1 else "one",
        in_flight=in_flight,
        passes=draw("one", PASSES),
        parts=draw("one model", ("two models", "pipeline")),
        zeroes=draw("after step", ("before forward", "after forward")),
        to_none=chance.random() < 0.8,
        optimizer=draw("AdamW", ("SGD", "momentum", "AdamW, state on the host")),
        passed=chance.random() < 0.5,
        other=draw("nothing", ("teacher", "average")),
        drop=draw(0.0, (0.1,)),
        share=round(chance.uniform(0.1, 0.9), 2),
    )
    # A batched pass through torch's checkpoints cannot draw random numbers again.
    return replace(loop, drop=0.0) if loop.passes == "batched" else loop


class Net(nn.Module):
    """Blocks and a head; returns the head's output, and a mean of what comes out in the middle."""

    def __init__(self, loop: RandomLoop, out: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(loop.drop) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, out)
        self.checkpoints = loop.checkpoints

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            if 2 * number < len(self.blocks):
                middle = x.mean(1)
        return self.head(x), middle


@dataclass(slots=True)
class Waiting:
    """Hold what waits for a backward: the losses of its forwards, and where a pipeline is cut."""

    main: Tensor
    second: Tensor  # of the same outputs
    early: Tensor  # of the middle of the model
    sent: list[Tensor]  # outputs of the first part
    received: list[Tensor]  # the same, as inputs of the second part


class Training:
    """The state of a loop: its models, its optimizer, and what else is on the device."""

    def __init__(self, loop: RandomLoop, env: Env) -> None:
        self.loop, self.env, self.forwards = loop, env, 0
        outs = (OUT,) if loop.parts == "one model" else (WIDTH, OUT)
        self.models = [Net(loop, out, 4 // len(outs)).to(env.device) for out in outs]
        parameters = [p for model in self.models for p in model.parameters()]
        if loop.optimizer in ("SGD", "momentum"):
            momentum = 0.9 * (loop.optimizer == "momentum")
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=1e-2, momentum=momentum)
        else:
            self.optimizer = torch.optim.AdamW(parameters)
        if "host" in loop.optimizer:
            keep_on_host(self.optimizer)
        self.teacher, self.averages = None, list[AveragedModel]()
        if loop.other == "teacher":
            self.teacher = Net(loop, OUT, 2).to(env.device).eval().requires_grad_(False)
        if loop.other == "average":
            self.averages = [
                AveragedModel(copy.deepcopy(m), multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m in self.models
            ]
        others = [*self.averages, *([self.teacher] if self.teacher is not None else [])]
        for model in self.models:
            env.plan(model, self.optimizer if loop.passed else None, others)

    def step(self, i: int) -> None:
        loop = self.loop
        if loop.zeroes == "before forward":
            self.optimizer.zero_grad(loop.to_none)
        for number in range(loop.accumulates):
            self.run_round(zeroes=loop.zeroes == "after forward" and number == 0)
        self.optimizer.step()
        for average, model in zip(self.averages, self.models, strict=False):
            average.update_parameters(model)
        self.env.note(*self.models)
        if loop.zeroes == "after step":
            self.optimizer.zero_grad(loop.to_none)

    def run_round(self, *, zeroes: bool) -> None:
        """Run forwards and their backwards, as many in flight as the loop has; `zeroes` before the first."""
        loop = self.loop
        waiting: deque[Waiting] = deque()
        for _ in range(loop.microbatches // loop.accumulates):
            waiting.append(self.forward())
            if len(waiting) == loop.in_flight:
                if zeroes:
                    self.optimizer.zero_grad(loop.to_none)
                zeroes = False
                if loop.order == "list":
                    waiting = deque([merged(waiting)])
                self.backward(waiting.popleft())
        while waiting:
            self.backward(waiting.popleft())

    def batch(self) -> Tensor:
        chance = random.Random(self.forwards)
        lengths = LENGTHS[self.loop.lengths] or (chance.choice(RANDOM),)
        length = lengths[self.forwards % len(lengths)]
        self.forwards += 1
        generator = torch.Generator().manual_seed(self.forwards)
        return torch.randn(BATCH, length, WIDTH, generator=generator).to(self.env.device)

    def forward(self) -> Waiting:
        x, sent, received = self.batch(), [], []
        out, middle = self.models[0](x)
        for model in self.models[1:]:
            if self.loop.parts == "pipeline":
                sent.append(out)
                out = out.detach().requires_grad_()
                received.append(out)
            out, middle = model(out)
        wanted: Tensor | float = 0.0
        if self.teacher is not None:
            with torch.no_grad():
                wanted = self.teacher(x)[0]
        return Waiting(
            (out - wanted).square().mean(), out.abs().mean(), middle.square().mean(), sent, received
        )

    def backward(self, waiting: Waiting) -> None:
        match self.loop.passes:
            case "one":
                waiting.main.backward()
            case "adaptive":
                self.adaptive(waiting)
            case "early":
                waiting.early.backward(retain_graph=True)
                waiting.main.backward()
            case "retained":
                waiting.main.backward(retain_graph=True)
                waiting.main.backward()
            case "batched":
                self.batched(waiting)
            case "engine":
                run_engine(waiting.main)
            case "thread":
                on_thread(waiting.main.backward)
        if waiting.sent:
            torch.autograd.backward(waiting.sent, [one.grad for one in waiting.received])

    def adaptive(self, waiting: Waiting) -> None:
        """Weigh two losses by their gradients at the last layer, as VQGAN does, and GradNorm."""
        last = self.models[-1].head.weight
        one, other = (
            torch.autograd.grad(loss, last, retain_graph=True)[0].norm()
            for loss in (waiting.main, waiting.second)
        )
        (waiting.main + one / (other + 1e-4) * waiting.second).backward()

    def batched(self, waiting: Waiting) -> None:
        """Add the gradients of two losses, from one batched pass."""
        losses = torch.stack([waiting.main, waiting.second])
        parts = self.models[-1:] if waiting.sent else self.models
        leaves = [*waiting.received, *(p for model in parts for p in model.parameters())]
        each = torch.eye(2, device=losses.device)
        for leaf, found in zip(
            leaves, torch.autograd.grad(losses, leaves, each, is_grads_batched=True), strict=True
        ):
            leaf.grad = found.sum(0) if leaf.grad is None else leaf.grad.add_(found.sum(0))


def merged(all_waiting: Sequence[Waiting]) -> Waiting:
    """Return what waits for one backward of all."""
    return Waiting(
        torch.stack([one.main for one in all_waiting]).sum(),
        torch.stack([one.second for one in all_waiting]).sum(),
        torch.stack([one.early for one in all_waiting]).sum(),
        [out for one in all_waiting for out in one.sent],
        [out for one in all_waiting for out in one.received],
    )


def run_engine(loss: Tensor) -> None:
    """Run backward as apex and Megatron do."""
    Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def on_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def keep_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Keep the optimizer's state in numpy between its steps, as trainers for reinforcement learning do."""
    host: dict[Any, dict[str, Any]] = {}

    def load(*_: Any) -> None:
        for parameter, state in host.items():
            optimizer.state[parameter] = {k: torch.tensor(v).to(device) for k, (v, device) in state.items()}

    def store(*_: Any) -> None:
        for parameter, state in optimizer.state.items():
            host[parameter] = {k: (v.cpu().numpy().copy(), v.device) for k, v in state.items()}
        optimizer.state.clear()

    optimizer.register_step_pre_hook(load)
    optimizer.register_step_post_hook(store)


def tried(loop: RandomLoop, meter: Callable[[], Meter]) -> Row:
    """Run a loop plainly, with checkpoints and planned, and return its row."""
    plain = Run(loop, meter(), None, loop.steps)
    if plain.error is not None:
        raise plain.error
    checkpointed = Run(replace(loop, checkpoints=True), meter(), None, loop.steps)
    if checkpointed.error is not None:
        raise checkpointed.error
    most, least = max(plain.peaks), min(max(plain.peaks), max(checkpointed.peaks))
    budget = int(least + loop.share * (most - least))
    run = Run(loop, meter(), budget, loop.steps)
    return judged(str(loop), budget, plain, run, loop.period, feasible=True)
