"""Measure the host's time of a step: `python -m benchmarks.host [--only Llama] [--rounds N] [--profile WAY]`.

Models on a few numbers, where all the time is that of Python and the dispatcher. All ways of training take
turns within each round, each in a process of its own (planned models in one process look at each other), by
the CPU time of the thread; the least of the rounds is printed with the quartiles. *Floor* is a dispatch mode
that passes each call on, with hooks that return their argument. What *nothing recomputed* adds to plain is
the fixed cost of a plan. The line under a table compares ours with torch's checkpoint at the same peak.
benchmarks/overhead.py measures single ops.
"""

from __future__ import annotations

import cProfile
import multiprocessing
import pstats
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ac_client
from autoac.planner import plan
from autoac.profiler import profile
from benchmarks.models import batches
from benchmarks.models.batches import Batch
from benchmarks.models.gpt2 import gpt2
from benchmarks.results import bench_parser, chosen, markdown_table, write_result
from benchmarks.steps import Trainee, rotated
from benchmarks.torch_checkpoint import wrap_blocks

PLAIN, FLOOR, CHECKPOINT, SELECTIVE, REMAT = "plain", "floor", "checkpoint", "selective", "torch_remat"
SAVES_ALL, AT_CHECKPOINT, HALF_WAY = "ours, nothing recomputed", "ours, checkpoint's peak", "ours, half way"
WAYS = [PLAIN, FLOOR, CHECKPOINT, SELECTIVE, SAVES_ALL, HALF_WAY, AT_CHECKPOINT]
if find_spec("torch_remat"):
    WAYS.append(REMAT)
STEPS = 3  # in a turn


@dataclass(frozen=True, slots=True)
class HostModel:
    """A model whose kernels take no time, its batch, and its blocks for a checkpoint."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    blocks: Callable[[Any], Iterable[nn.Module]]


def _text() -> Batch:
    return batches.tokens(2, 24, 64)


SMALL: dict[str, Any] = {
    "num_hidden_layers": 8,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
}

MODELS = {
    "Llama": HostModel(
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **{**SMALL, "num_hidden_layers": 16}, num_key_value_heads=2, vocab_size=64, use_cache=False
            )
        ),
        _text,
        lambda model: model.model.layers,
    ),
    "GPT-2": HostModel(
        lambda: gpt2(layers=8, width=16, heads=2, vocabulary=64, positions=32),
        _text,
        lambda model: model.transformer.h,
    ),
    "ViT": HostModel(
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(**SMALL, image_size=8, patch_size=2, hidden_dropout_prob=0.1)
        ),
        lambda: batches.images(2, 8),
        lambda model: [block for name, block in model.named_modules() if type(block).__name__ == "ViTLayer"],
    ),
    "ResNet": HostModel(
        lambda: transformers.ResNetForImageClassification(
            transformers.ResNetConfig(
                embedding_size=4, hidden_sizes=[4, 8, 8, 8], depths=[2, 2, 2, 2], layer_type="basic"
            )
        ),
        lambda: batches.images(2, 16),
        lambda model: [b for b in model.modules() if type(b).__name__ == "ResNetBasicLayer"],
    ),
    "Mamba": HostModel(
        lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(
                vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=4, use_cache=False
            )
        ),
        lambda: {name: ids[:, :8] for name, ids in _text().items()},
        lambda model: model.backbone.layers,
    ),
}


class PassingMode(TorchDispatchMode):
    """Pass each call on: what a dispatch mode in Python must cost."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as the mode of a region

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


@dataclass(slots=True)
class Training:
    """One way of training a model, with the milliseconds of each step's parts."""

    trainee: Trainee
    optimizer: torch.optim.Optimizer
    floor: bool = False
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    optimize: list[float] = field(default_factory=list)
    both: list[float] = field(default_factory=list)  # forward and backward of one step

    def step(self) -> None:
        """Train one step, and note its times."""
        trainee = self.trainee
        with ExitStack() as around:
            if self.floor:
                around.enter_context(PassingMode())  # type: ignore[no-untyped-call]
                around.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
            began = time.thread_time()
            loss = trainee.loss(trainee.call(**trainee.batch))
            ran = time.thread_time()
        entered = time.thread_time()
        loss.backward()
        passed = time.thread_time()
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad()
        ended = time.thread_time()
        for taken, spent in (
            (self.forward, ran - began),
            (self.backward, passed - entered),
            (self.optimize, ended - passed),
            (self.both, ran - began + passed - entered),
        ):
            taken.append(spent * 1e3)

    def forget_times(self) -> None:
        """Forget the steps so far."""
        self.forward, self.backward, self.optimize, self.both = [], [], [], []


def training_of(model: HostModel, way: str) -> Training:
    """Return one way of training `model`, planned and warm."""
    torch.manual_seed(0)
    module, batch = model.make().train(), model.batch()
    if way in (CHECKPOINT, SELECTIVE):
        wrap_blocks(model.blocks(module), "checkpoint" if way == CHECKPOINT else "selective")
    elif way == REMAT:
        remat = import_module("torch_remat").checkpoint
        for i, block in enumerate(model.blocks(module)):
            block.forward = remat(region_name=str(i))(block.forward)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    if way == SAVES_ALL:
        ac_client.apply(module, budget_gb=1, optimizer=optimizer)
    elif way in (AT_CHECKPOINT, HALF_WAY):
        made_plan = plan(profile(module, **batch), budget_bytes=_budget(model, way), work_limit=4)
        ac_client.apply(module, policy=made_plan.policy(), optimizer=optimizer)
    made = Training(Trainee(module, batch), optimizer, floor=way == FLOOR)
    for _ in range(5):
        made.step()
    made.forget_times()
    return made


def _budget(model: HostModel, way: str) -> int:
    """Return the bytes that a step takes with the checkpoint around each block, or half way up to plain."""
    plain, wrapped = (Trainee(model.make().train(), model.batch()) for _ in range(2))
    wrap_blocks(model.blocks(wrapped.model), "checkpoint")
    peaks = []
    for trainee in (plain, wrapped):
        trainee.step()
        peaks.append(trainee.peak())
    static = profile(plain.model, **plain.batch).static.total
    return static + (peaks[1] if way == AT_CHECKPOINT else sum(peaks) // 2)


def train(turns: Connection, way: str) -> None:
    """Train the models whose names come through `turns`, a few steps for each None; send what they took."""
    torch.set_num_threads(1)
    made: Training | None = None
    while (name := turns.recv()) != "":
        if name is not None:
            made = None  # planned models count each other
            made = training_of(MODELS[name], way)
            planned = way.startswith("ours")
            turns.send(str(ac_client.applied(made.trainee.model).report().recomputed) if planned else "")
            continue
        assert made is not None
        made.forget_times()
        for _ in range(STEPS):
            made.step()
        turns.send((made.forward, made.backward, made.optimize, made.both))


def _shown(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{min(values):.2f} ({low:.2f} to {high:.2f})"


def measure(name: str, rounds: int, turns: dict[str, Connection]) -> str:
    """Return the table of a model, with a line below it.

    Args:
        turns: to the process of each way.
    """
    recomputed: dict[str, str] = {}
    for way, turn in turns.items():
        turn.send(name)
        recomputed[way] = turn.recv()
    taken: dict[str, list[list[float]]] = {way: [[], [], [], []] for way in turns}
    for number in range(rounds):
        for way in rotated(list(turns), number):
            turns[way].send(None)
            for times, more in zip(taken[way], turns[way].recv(), strict=True):
                times += more
    rows = [[way, recomputed[way], *map(_shown, times)] for way, times in taken.items()]
    least = {way: [min(one) for one in times] for way, times in taken.items()}
    ours, theirs, plain, saves = (least[way] for way in (AT_CHECKPOINT, CHECKPOINT, PLAIN, SAVES_ALL))
    added = (ours[0] - plain[0]) / (least[FLOOR][0] - plain[0])
    line = (
        f"At the checkpoint's peak: forward and backward {ours[3] / theirs[3]:.2f} of the "
        f"checkpoint's, backward {ours[1] / theirs[1]:.2f}; forward adds {added:.1f} "
        f"times what the floor adds. Nothing recomputed: {saves[0] / plain[0]:.2f} "
        f"of plain's forward, {saves[0] - plain[0]:+.2f} ms; the optimizer "
        f"{saves[2] - plain[2]:+.2f} ms."
    )
    head = [f"{name}, ms", "recomputed ops", "forward", "backward", "optimizer", "forward and backward"]
    return f"{markdown_table(head, rows)}\n\n{line}\n"


def tables(names: list[str], rounds: int) -> str:
    """Return the table of each model, measured by a process for each way."""
    spawn, turns, processes = multiprocessing.get_context("spawn"), {}, []
    for way in WAYS:
        turns[way], end = spawn.Pipe()
        processes.append(spawn.Process(target=train, args=(end, way), daemon=True))
        processes[-1].start()
    found = "\n".join(measure(name, rounds, turns) for name in names)
    for turn, process in zip(turns.values(), processes, strict=True):
        turn.send("")
        process.join()
    return found


def profiled(name: str, way: str) -> None:
    """Print where ten steps of one way spend their time."""
    training = training_of(MODELS[name], way)
    with cProfile.Profile() as calls:
        for _ in range(10):
            training.step()
    for order in ("tottime", "cumtime"):
        pstats.Stats(calls).sort_stats(order).print_stats(45)


def main() -> None:
    """Measure, and write the tables."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--profile", choices=WAYS, help="print where the steps of this way spend their time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = list(chosen(MODELS, options.only))
    if options.profile is not None:
        for name in names:
            profiled(name, options.profile)
        return
    write_result(tables(names, options.rounds), options.out)


if __name__ == "__main__":
    main()
