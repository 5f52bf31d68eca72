"""Train under a plan in the ways to use several ranks, and compare with plain training on each rank.

    PYTHONPATH=tests python -m rank_setups [--only NAME ...] [--out FILE]

Each row trains a small transformer for four steps: plainly; with torch's checkpoint around each block; at a
budget that no plan fits, whose error names the smallest peak; and 30 % of the way from there to what plain
training takes. Gradients, parameters and collectives are compared on ranks that communicate over gloo. Peaks,
in KiB above what stays, are from ranks that send nothing, where that works: gloo frees late. Reported, of the
worst of the ranks with the longest batch:

- *equal*: gradients of all steps and the parameters, bit for bit;
- *collectives*: of the last step, ours and plain's;
- *plain*, *checkpoint*, *smallest*: peaks, of which the last is predicted and proven by a plan;
- *off*: measured less predicted peak of the planned run, in bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import outputs_of_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import ac_client
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import Constraints, find_minimum_peak
from autoac.planner.problem.build import build
from autoac.planner.units import GIB
from autoac.tape.distributed.fsdp import unreduced_nbytes
from benchmarks.results import add_out_argument, markdown_table, write_result

WIDTH, ROWS, LENGTH, WORDS = 64, 4, 64, 96
SHARE = 0.3  # of the way from the smallest peak to plain's


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 16)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(-2))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 256, bias=False), nn.Linear(256, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Experts(nn.Module):
    """One expert for each rank: tokens go to their expert and come back, by two exchanges of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = Feed()

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_to_all_single

        tokens = x.flatten(0, 1)
        sent = all_to_all_single(torch.empty_like(tokens), tokens)
        done = self.feed(sent)
        return all_to_all_single(torch.empty_like(done), done.contiguous()).view_as(x)


class Adapted(nn.Module):
    """LoRA: a frozen product and two small ones that are trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, feed: nn.Module, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.n1, self.attn, self.n2, self.feed = nn.RMSNorm(WIDTH), Attention(), nn.RMSNorm(WIDTH), feed

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.n1(x)))
        return x + self.drop(self.feed(self.n2(x)))


class Words(nn.Module):
    def __init__(
        self,
        *,
        words: int = WORDS,
        dropout: float = 0.0,
        tied: bool = False,
        experts: bool = False,
        unused: bool = False,
    ) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(words, WIDTH), nn.RMSNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(Experts() if experts else Feed(), dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.unused = nn.Linear(WIDTH, 1) if unused else None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


Wrap = Callable[[Words], nn.Module]


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to use several ranks."""

    wrap: Wrap  # after the blocks have been checkpointed, if they are
    make: Callable[[], Words] = Words
    world: int = 2
    microbatches: int = 1  # all but the last without reduction
    lengths: tuple[int, ...] = (LENGTH,)  # of the batch, by rank
    whole_loss: bool = True  # False: a loss over shards of the words
    split: int = 1  # ranks that share one batch
    stages: int = 1  # of a pipeline, whose ranks of one stage are next to each other
    constraints: Constraints | None = None
    pins: Constraints | None = None  # of the planned run, in their place


def ddp(**settings: Any) -> Wrap:
    return lambda model: DistributedDataParallel(model, **settings)


def sharded(*sizes: int, last: bool = False, **settings: Any) -> Wrap:
    def wrap(model: Words) -> nn.Module:
        shape = sizes or (dist.get_world_size(),)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **settings)
        if last:
            fully_shard([model.norm, model.head], mesh=mesh, **settings)
        return fully_shard(model, mesh=mesh, **settings)

    return wrap


def adapted() -> Words:
    model = Words()
    for block in model.blocks:
        block.attn.q, block.attn.v = Adapted(block.attn.q), Adapted(block.attn.v)
    return model.requires_grad_(False).apply(_train_adapters)


def _train_adapters(module: nn.Module) -> None:
    if isinstance(module, Adapted):
        module.down.requires_grad_(True), module.up.requires_grad_(True)


def tensor_parallel(*, sequence: bool = False, loss: bool = False, also_sharded: bool = False) -> Wrap:
    def wrap(model: Words) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
        columns = {f"attn.{name}": ColwiseParallel() for name in "qkv"} | {"feed.up": ColwiseParallel()}
        out = {"output_layouts": Shard(1)} if sequence else {}
        rows = {"attn.o": RowwiseParallel(**out), "feed.down": RowwiseParallel(**out)}
        whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        norms = {name: SequenceParallel() for name in ("n1", "n2")}
        inputs = {name: PrepareModuleInput(**whole) for name in ("attn", "feed")}
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], columns | rows | (norms | inputs if sequence else {}))
        if sequence:
            outside = {
                "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "head": ColwiseParallel(
                    input_layouts=Shard(1),
                    output_layouts=Shard(-1) if loss else Replicate(),
                    use_local_output=not loss,
                ),
            }
            parallelize_module(model, mesh["tensor"], outside)
        if also_sharded:
            for block in model.blocks:
                fully_shard(block, mesh=mesh["data"])
            fully_shard(model, mesh=mesh["data"])
        return model

    return wrap


class Copied(torch.autograd.Function):
    """Give each rank of a group the same tensor; backward sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Summed.apply(grad)


class Summed(torch.autograd.Function):
    """Sum over all ranks; backward gives each the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def by_hand(model: Words) -> nn.Module:
    """Cut the weights, and communicate by Functions of our own."""
    for block in model.blocks:
        for part, first, last in (
            (block.attn, (block.attn.q, block.attn.k, block.attn.v), block.attn.o),
            (block.feed, (block.feed.up,), block.feed.down),
        ):
            for linear, dim in *((one, 0) for one in first), (last, 1):
                own = linear.weight.detach().chunk(2, dim)[dist.get_rank() % 2].clone()
                linear.weight = nn.Parameter(own)
            part.register_forward_pre_hook(lambda _, args: Copied.apply(args[0]))
            part.register_forward_hook(lambda _, args, out: Summed.apply(out))
    return model


def staged(model: Words) -> nn.Module:
    """Return this rank's half of the model, sharded over the ranks that have the same."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("stage", "data"))
    last = mesh["stage"].get_local_rank()
    model.blocks = model.blocks[2:] if last else model.blocks[:2]
    for name in ("words",) if last else ("norm", "head"):
        setattr(model, name, nn.Identity())
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    model.group = mesh["stage"].get_group()
    return fully_shard(model, mesh=mesh["data"])


AGAIN: dict[str, Any] = {
    "constraints": Constraints(save_collectives=False),
    "pins": Constraints(save_collectives=False, pin_recompute=("*/_c10d_functional.*", "*/aten.cat")),
}

SETUPS: dict[str, Setup] = {
    "DDP": Setup(ddp()),
    "DDP, static graph": Setup(ddp(static_graph=True)),
    "DDP, unused parameters": Setup(ddp(find_unused_parameters=True), lambda: Words(unused=True)),
    "DDP, gradients in buckets": Setup(ddp(gradient_as_bucket_view=True)),
    "DDP, unequal lengths": Setup(ddp(), lengths=(LENGTH, LENGTH // 2)),
    "FSDP2": Setup(sharded()),
    "FSDP2, in bf16": Setup(sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))),
    "FSDP2, kept gathered": Setup(sharded(reshard_after_forward=False)),
    "FSDP2, resharded to 2": Setup(sharded(reshard_after_forward=2), world=4),
    "FSDP2, tied": Setup(sharded(), lambda: Words(tied=True)),
    "FSDP2, LoRA": Setup(sharded(), adapted),
    "FSDP2, uneven shards": Setup(sharded(), lambda: Words(words=97)),
    "FSDP2, norm and head in one unit": Setup(sharded(last=True)),
    "FSDP2, unequal lengths": Setup(sharded(), lengths=(LENGTH, LENGTH // 2)),
    "FSDP2, accumulation": Setup(sharded(), microbatches=2),
    "HSDP 2x2": Setup(sharded(2, 2), world=4),
    "TP": Setup(tensor_parallel(), split=2),
    "TP, sequence": Setup(tensor_parallel(sequence=True), split=2),
    "TP, loss": Setup(tensor_parallel(sequence=True, loss=True), whole_loss=False, split=2),
    "TP, dropout": Setup(tensor_parallel(sequence=True), lambda: Words(dropout=0.1), split=2),
    "TP, uneven shards": Setup(tensor_parallel(sequence=True), lambda: Words(words=97), split=2),
    "FSDP2 over TP 2x2": Setup(tensor_parallel(sequence=True, also_sharded=True), world=4, split=2),
    "TP, collectives again": Setup(tensor_parallel(), split=2, constraints=AGAIN["constraints"]),
    "TP, sequence, collectives again": Setup(tensor_parallel(sequence=True), split=2, **AGAIN),
    "FSDP2 over TP 2x2, collectives again": Setup(
        tensor_parallel(sequence=True, also_sharded=True), world=4, split=2, **AGAIN
    ),
    "TP, functions": Setup(by_hand, split=2),
    "experts": Setup(ddp(), lambda: Words(experts=True)),
    "FSDP2, 1F1B": Setup(staged, world=4, microbatches=4, stages=2),
}


class Collectives(TorchDispatchMode):
    """Count the collectives that run inside; with `settles`, wait until gloo lets go of what it sent."""

    def __init__(self, *, settles: bool = True) -> None:
        super().__init__()
        self.count, self.settles = 0, settles

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        communicates, waits = func.namespace in ("c10d", "_c10d_functional"), "wait" in func.name()
        self.count += communicates and not waits
        out = func(*args, **(kwargs or {}))
        if communicates and waits and self.settles:
            time.sleep(0.01)  # its thread lets go once the wait has returned
        return out


def made(setup: Setup, *, checkpoints: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = setup.make()
    if checkpoints:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
    return setup.wrap(model)


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gradients(model: nn.Module) -> Iterator[Tensor]:
    return (local(p.grad).clone() for p in model.parameters() if p.grad is not None)


def step(setup: Setup, model: nn.Module, number: int) -> int:
    """Train one step; return the bytes of gradients that waited for a reduction."""
    unreduced = 0
    torch.manual_seed(number)
    rank = dist.get_rank()
    length = setup.lengths[rank % len(setup.lengths)]
    if setup.stages > 1:
        return pipelined_step(setup, model, number)
    for micro in range(setup.microbatches):
        if setup.microbatches > 1:
            model.set_requires_gradient_sync(micro + 1 == setup.microbatches)  # type: ignore[operator]
        seed = torch.Generator().manual_seed(100 * number + 10 * micro + rank // setup.split)
        ids = torch.randint(0, WORDS, (ROWS, length), generator=seed)
        with nullcontext() if setup.whole_loss else loss_parallel():
            F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        unreduced = max(unreduced, unreduced_nbytes(model))
    return unreduced


def pipelined_step(setup: Setup, model: nn.Module, number: int) -> int:
    """Train one step; return the bytes that the schedule holds for itself and for other microbatches."""
    rows, group = setup.microbatches * ROWS, model.group
    seed = torch.Generator().manual_seed(100 * number + dist.get_rank() % (setup.world // setup.stages))
    ids = torch.randint(0, WORDS, (rows, LENGTH), generator=seed)
    x = torch.empty(ROWS, LENGTH, WIDTH, device="meta", requires_grad=True)
    first = dist.get_rank(group) == 0
    out = x if first else torch.empty(ROWS, LENGTH, WORDS, device="meta", requires_grad=True)
    stage = PipelineStage(
        model,
        dist.get_rank(group),
        setup.stages,
        torch.device("cpu"),
        input_args=ids[:ROWS].to("meta") if first else x,
        output_args=out,
        group=group,
    )
    loss = lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten())  # noqa: E731
    schedule = Schedule1F1B(stage, setup.microbatches, loss_fn=loss)
    schedule.step(*([ids] if first else []), target=None if first else ids.roll(-1, 1))
    if first:  # buffers for the gradients of outputs
        return setup.microbatches * x.nbytes
    # Outputs and losses, buffers, and the targets next to the inputs.
    return (setup.microbatches - 1) * (x.nbytes + out.nbytes + 4) + 2 * x.nbytes + ids.nbytes


def train(setup: Setup, model: nn.Module, settles: bool) -> tuple[list[list[Tensor]], int, int]:
    """Return the gradients of each step and the parameters, the least peak, and collectives.

    The peak is that of the third step; with `settles`, the least of three, as gloo frees late. Gradients that
    wait for a reduction are static bytes of a plan, so they are not part of the peak.
    """
    found, peaks, count = [], [], 0
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for number in range(5 if settles else 3):
        optimizer.zero_grad()
        judged = number > 1
        collectives = Collectives(settles=judged and settles)
        with AllocatorTimeline(base=0) if judged else nullcontext() as timeline, collectives:
            unreduced = step(setup, model, number)
        if timeline is not None:
            peaks.append(timeline.peak_bytes - unreduced)
        count = collectives.count
        found.append(list(gradients(model)))
        optimizer.step()
    found.append([local(p).detach().clone() for p in model.parameters()])
    return found, min(peaks), count


def run(name: str, backend: str, exact: bool) -> Facts:
    """Return the facts of one setup on this rank."""
    setup, settles = SETUPS[name], exact and backend != "fake"
    group = None if backend == "fake" else "auto"  # ranks that send nothing cannot agree on anything
    plain, plain_peak, plain_count = train(setup, made(setup), settles)
    _, checkpoint_peak, _ = train(setup, made(setup, checkpoints=True), settles)
    tight = made(setup)
    ac_client.apply(tight, 1 if setup.stages > 1 else 1e-6, group=group, constraints=setup.constraints)
    smallest = 0
    for number in range(2):
        tight.zero_grad()
        try:
            step(setup, tight, number)
        except ac_client.InfeasibleBudget as error:
            smallest = error.smallest_found
            break
    planned = made(setup)
    static = sum(local(p).nbytes for p in tight.parameters())
    if setup.stages > 1:  # an error would leave the other stages waiting
        plan = ac_client.applied(tight).plan
        unreduced = sum(4 * parameter.numel() for parameter in tight.parameters())
        counted = plan.graph.static_bytes - build(plan.profile).static_bytes
        smallest = find_minimum_peak(plan.graph).found + unreduced - counted
        static += plan.profile.static.inputs
    if dist.get_backend() != "fake" and not exact:
        smallest += smallest // 20  # the next observed step may find more that gloo frees late
    budget = torch.tensor([int(smallest + SHARE * max(0, plain_peak + static - smallest))])
    if setup.stages == 1:
        dist.all_reduce(budget, dist.ReduceOp.MAX)
    pins = setup.pins or setup.constraints
    ac_client.apply(planned, int(budget) / GIB, group=group, constraints=pins)
    ours, peak, count = train(setup, planned, settles)
    applied = ac_client.applied(planned)
    predicted, report = applied.policy.predicted, applied.report()
    if setup.stages == 1:
        static = predicted.static_bytes
    batch = ROWS * setup.lengths[dist.get_rank() % len(setup.lengths)] * 8 * setup.microbatches
    return {
        "equal": all(
            torch.equal(a, b) for x, y in zip(ours, plain, strict=True) for a, b in zip(x, y, strict=True)
        ),
        "collectives": [count, plain_count],
        "plain": plain_peak,
        "checkpoint": checkpoint_peak,
        "smallest": smallest - static,
        "off": peak - predicted.peak_bytes + static - batch,
        "recomputed": report.recomputed,
        "off path": report.off_path,
    }


HEAD = [
    "setup",
    "ranks",
    "equal",
    "collectives",
    "plain",
    "checkpoint",
    "smallest",
    "off",
    "recomputed",
    "said",
]
SCRIPT = """
import json
from rank_setups import run
print(json.dumps({{name: run(name, backend, {exact}) for name in {names!r}}}))
"""

Facts = dict[str, Any]


def facts_of(
    names: Sequence[str], store: Path, backend: str, only: Sequence[int] | None = None, *, exact: bool = True
) -> dict[str, list[Facts]]:
    """Return the facts of setups with equally many ranks, by rank.

    Args:
        store: a file through which the ranks meet; must not exist.
        only: as in `outputs_of_ranks`.
        exact: wait until gloo lets go of what it sent, so that peaks can be compared.
    """
    (world,) = {SETUPS[name].world for name in names}
    script = SCRIPT.format(names=list(names), exact=exact)
    outs = outputs_of_ranks(script, store, world, timeout=300, backend=backend, only=only)
    ranks = [json.loads(out.splitlines()[-1]) for out in outs]
    return {name: [rank[name] for rank in ranks] for name in names}


def row(name: str) -> list[object]:
    """Return the row of one setup, from the worst of its ranks."""
    world, by_backend = SETUPS[name].world, {}
    needs_answers = name.startswith("DDP") or name in ("experts", "FSDP2, 1F1B")
    for backend in ("gloo",) if needs_answers else ("gloo", "fake"):
        with tempfile.TemporaryDirectory() as folder:
            by_backend[backend] = facts_of([name], Path(folder) / "store", backend)[name]
    real = by_backend["gloo"]
    exact = by_backend.get("fake", real)
    lengths = SETUPS[name].lengths  # the rank with the longest batch plans
    exact = [facts for rank, facts in enumerate(exact) if lengths[rank % len(lengths)] == max(lengths)]
    worst = max(exact, key=lambda facts: facts["smallest"] / facts["checkpoint"])
    counts = {tuple(facts["collectives"]) for facts in real}
    return [
        name,
        world,
        "yes" if all(facts["equal"] for facts in real) else "NO",
        ", ".join(f"{ours} of {plain}" for ours, plain in sorted(counts)),
        *(f"{worst[kind] / 1024:,.0f}" for kind in ("plain", "checkpoint", "smallest")),
        max((facts["off"] for facts in exact), key=abs),
        min(facts["recomputed"] for facts in real),
        "; ".join(sorted({facts["off path"] for facts in real} - {""})),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(SETUPS), choices=list(SETUPS))
    add_out_argument(parser)
    options = parser.parse_args()
    rows = []
    for name in options.only:
        try:
            rows.append(row(name))
        except AssertionError as error:  # a rank failed
            rows.append([name, SETUPS[name].world, str(error).strip().splitlines()[-1], *[""] * 7])
        print(*rows[-1], sep=" | ", flush=True)
    write_result(markdown_table(HEAD, rows), options.out)
    raise SystemExit(any(one[2] != "yes" for one in rows))


if __name__ == "__main__":
    main()
