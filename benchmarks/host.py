"""Measure the host's time of a step: `python -m benchmarks.host [--only Llama] [--rounds N] [--profile WAY]`.

Models on a few numbers, where all the time is that of Python and the dispatcher. All ways of training take
turns within each round, in one process, by the CPU time of the thread; the least of the rounds is printed
with the quartiles. *Floor* is a dispatch mode that passes each call on, with hooks that return their
argument. What *nothing recomputed* adds to plain is the fixed cost of a plan. The line under a table compares
ours with torch's checkpoint at the same peak. benchmarks/overhead.py measures single ops.
"""

from __future__ import annotations

import copy
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
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


def trainings(model: HostModel) -> dict[str, Training]:
    """Return each way of training `model`, planned and warm."""
    torch.manual_seed(0)
    first, batch = model.make().train(), model.batch()
    made: dict[str, Training] = {}
    peaks = {}
    for way in WAYS:
        module = copy.deepcopy(first)
        if way in (CHECKPOINT, SELECTIVE):
            wrap_blocks(model.blocks(module), "checkpoint" if way == CHECKPOINT else "selective")
        elif way == REMAT:
            remat = import_module("torch_remat").checkpoint
            for i, block in enumerate(model.blocks(module)):
                block.forward = remat(region_name=str(i))(block.forward)
        trainee = Trainee(module, batch)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        if way in (PLAIN, CHECKPOINT):
            trainee.step()
            peaks[way] = trainee.peak()
        elif way == SAVES_ALL:
            ac_client.apply(module, budget_gb=1, optimizer=optimizer)
        elif way in (AT_CHECKPOINT, HALF_WAY):  # policies: budgets would count the other models
            taken = profile(module, **batch)
            peak = peaks[CHECKPOINT] if way == AT_CHECKPOINT else (peaks[CHECKPOINT] + peaks[PLAIN]) // 2
            made_plan = plan(taken, budget_bytes=taken.static.total + peak, work_limit=4)
            ac_client.apply(module, policy=made_plan.policy(), optimizer=optimizer)
        made[way] = Training(trainee, optimizer, floor=way == FLOOR)
        for _ in range(5):
            made[way].step()
        made[way].forget_times()
    return made


def _shown(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{min(values):.2f} ({low:.2f} to {high:.2f})"


def measure(name: str, rounds: int) -> str:
    """Return the table of a model, with a line below it."""
    made = trainings(MODELS[name])
    for number in range(rounds):
        for way in rotated(WAYS, number):
            made[way].step()
    rows = []
    for way, training in made.items():
        times = (training.forward, training.backward, training.optimize, training.both)
        recomputed = ""
        if way.startswith("ours"):
            recomputed = str(ac_client.applied(training.trainee.model).report().recomputed)
        rows.append([way, recomputed, *map(_shown, times)])
    ours, theirs, plain, saves = (made[way] for way in (AT_CHECKPOINT, CHECKPOINT, PLAIN, SAVES_ALL))
    added = (min(ours.forward) - min(plain.forward)) / (min(made[FLOOR].forward) - min(plain.forward))
    line = (
        f"At the checkpoint's peak: forward and backward {min(ours.both) / min(theirs.both):.2f} of the "
        f"checkpoint's, backward {min(ours.backward) / min(theirs.backward):.2f}; forward adds {added:.1f} "
        f"times what the floor adds. Nothing recomputed: {min(saves.forward) / min(plain.forward):.2f} "
        f"of plain's forward, {min(saves.forward) - min(plain.forward):+.2f} ms; the optimizer "
        f"{min(saves.optimize) - min(plain.optimize):+.2f} ms."
    )
    head = [f"{name}, ms", "recomputed ops", "forward", "backward", "optimizer", "forward and backward"]
    return f"{markdown_table(head, rows)}\n\n{line}\n"


def profiled(name: str, way: str) -> None:
    """Print where ten steps of one way spend their time."""
    training = trainings(MODELS[name])[way]
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
    names = chosen(MODELS, options.only)
    if options.profile is not None:
        for name in names:
            profiled(name, options.profile)
        return
    write_result("\n".join(measure(name, options.rounds) for name in names), options.out)


if __name__ == "__main__":
    main()
