"""Train models that communicate in forward, plainly and with recompute, on two and on four ranks.

    make bench-collectives

First, each collective of torch.distributed in a small network: in an autograd.Function and outside of one,
under every way to recompute. Each plan recomputes all that it may, so no clock decides what is tested. Then a
mixture of experts whose ranks exchange tokens, under plans for random op times and budgets, other plans on
each rank. Losses and gradients must equal the plain ones bit for bit, and backward must communicate as often
as the plain backward.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.multiprocessing.spawn import spawn
from torch.utils.checkpoint import CheckpointPolicy

import ac_client
from ac_client import Constraints, checkpoint, save_recompute_policy
from autoac.planner import Policy, build, plan, simulate
from autoac.planner.errors import InfeasibleBudget, SolverOutOfTime
from autoac.profiler import profile

ROWS = WIDTH = 8  # ROWS is a multiple of each number of ranks
STEPS = 3  # an observed one, a planned one, one without the mode in modules that save everything


def _size() -> int:
    return dist.get_world_size()


def _neighbors() -> tuple[int, int]:
    """Return the ranks after and before this one."""
    return (dist.get_rank() + 1) % _size(), (dist.get_rank() - 1) % _size()


def _group() -> Any:
    return dist.group.WORLD


def _like_each(y: Tensor) -> list[Tensor]:
    return [torch.empty_like(y) for _ in range(_size())]


def _parts(y: Tensor) -> list[Tensor]:
    return [part.contiguous() for part in y.chunk(_size())]


def _spread(part: Tensor) -> Tensor:
    return part.repeat(_size(), 1)


# --- one function for each collective: from activations [ROWS, WIDTH] to others of the same shape -----------


def all_reduce(y: Tensor) -> Tensor:
    dist.all_reduce(y)
    return y


def all_reduce_async(y: Tensor) -> Tensor:
    out = y.clone()
    work = dist.all_reduce(out, async_op=True)
    other = y.cos()
    work.wait()
    return out + other


def all_reduce_part(y: Tensor) -> Tensor:
    dist.all_reduce(y[: ROWS // 2])
    return y


def all_reduce_coalesced(y: Tensor) -> Tensor:
    both = [y.clone(), y.exp()]
    dist.all_reduce_coalesced(both)
    return both[0] + both[1]


def broadcast(y: Tensor) -> Tensor:
    dist.broadcast(y, 0)
    return y


def reduce(y: Tensor) -> Tensor:
    dist.reduce(y, 0)
    return y if dist.get_rank() == 0 else torch.full_like(y, 0.5)  # undefined on other ranks


def all_gather(y: Tensor) -> Tensor:
    received = _like_each(y)
    dist.all_gather(received, y)
    return torch.stack(received).sum(0)


def all_gather_async(y: Tensor) -> Tensor:
    received = _like_each(y)
    dist.all_gather(received, y, async_op=True).wait()
    return received[0] - received[-1]


def all_gather_views(y: Tensor) -> Tensor:
    received = y.new_empty(_size(), *y.shape)
    dist.all_gather(list(received.unbind()), y)
    return received.sum(0)


def all_gather_coalesced(y: Tensor) -> Tensor:
    received = [[torch.empty_like(y), torch.empty_like(y)] for _ in range(_size())]
    dist.all_gather_coalesced(received, [y, y.exp()])
    return received[0][1] + received[-1][0]


def all_gather_into_tensor(y: Tensor) -> Tensor:
    received = y.new_empty(_size() * ROWS, WIDTH)
    dist.all_gather_into_tensor(received, y)
    return received.view(_size(), ROWS, WIDTH).sum(0)


def all_gather_into_tensor_coalesced(y: Tensor) -> Tensor:
    received = [y.new_empty(_size() * ROWS, WIDTH) for _ in range(2)]
    with distributed_c10d._coalescing_manager():
        dist.all_gather_into_tensor(received[0], y)
        dist.all_gather_into_tensor(received[1], y.exp())
    return received[0][:ROWS] + received[1][-ROWS:]


def reduce_scatter(y: Tensor) -> Tensor:
    parts = _parts(y)
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts)
    return _spread(out)


def reduce_scatter_tensor(y: Tensor) -> Tensor:
    out = y.new_empty(ROWS // _size(), WIDTH)
    dist.reduce_scatter_tensor(out, y)
    return _spread(out)


def reduce_scatter_tensor_coalesced(y: Tensor) -> Tensor:
    outs = [y.new_empty(ROWS // _size(), WIDTH) for _ in range(2)]
    inputs = [y, y.exp()]
    with distributed_c10d._coalescing_manager():
        for out, each in zip(outs, inputs, strict=True):
            dist.reduce_scatter_tensor(out, each)
    return _spread(outs[0] * outs[1])


def all_to_all(y: Tensor) -> Tensor:
    parts = _parts(y)
    received = [torch.empty_like(part) for part in parts]
    dist.all_to_all(received, parts)
    return torch.cat(received)


def all_to_all_single(y: Tensor) -> Tensor:
    out = torch.empty_like(y)
    dist.all_to_all_single(out, y)
    return out


def gather(y: Tensor) -> Tensor:
    received = _like_each(y) if dist.get_rank() == 0 else None
    dist.gather(y, received)
    return torch.stack(received).sum(0) if received is not None else y.cos()


def scatter(y: Tensor) -> Tensor:
    out = torch.empty_like(y)
    dist.scatter(out, [y + i for i in range(_size())] if dist.get_rank() == 0 else None)
    return out


def send_and_recv(y: Tensor) -> Tensor:
    after, before = _neighbors()
    out = torch.empty_like(y)
    if dist.get_rank() % 2:
        dist.recv(out, before)
        dist.send(y, after)
    else:
        dist.send(y, after)
        dist.recv(out, before)
    return out


def recv_any_source(y: Tensor) -> Tensor:
    out = torch.empty_like(y)
    sent = dist.isend(y, _neighbors()[0])
    dist.recv(out)
    assert sent is not None
    sent.wait()
    return out


def batch_isend_irecv(y: Tensor) -> Tensor:
    after, before = _neighbors()
    out = torch.empty_like(y)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, y, after), dist.P2POp(dist.irecv, out, before)]
    ):
        work.wait()
    return out


def barrier(y: Tensor) -> Tensor:
    dist.barrier()
    return y * 2


def all_gather_object(y: Tensor) -> Tensor:
    received: list[Any] = [None] * _size()
    dist.all_gather_object(received, {"rank": dist.get_rank()})
    out: Tensor = y * sum(one["rank"] for one in received)
    return out


def functional_all_reduce(y: Tensor) -> Tensor:
    out: Tensor = functional.all_reduce(y, "sum", _group()) * 1
    return out


def functional_all_reduce_in_place(y: Tensor) -> Tensor:
    torch.ops._c10d_functional.all_reduce_(y, "sum", _group().group_name)
    out: Tensor = torch.ops._c10d_functional.wait_tensor(y)
    return out


def functional_all_gather(y: Tensor) -> Tensor:
    return functional.all_gather_tensor(y, 0, _group())[-ROWS:] * 1


def functional_reduce_scatter(y: Tensor) -> Tensor:
    return _spread(functional.reduce_scatter_tensor(y, "sum", 0, _group()) * 1)


def functional_all_to_all(y: Tensor) -> Tensor:
    return functional.all_to_all_single(y, None, None, _group()) * 1


def functional_broadcast(y: Tensor) -> Tensor:
    out: Tensor = functional.broadcast(y, 0, _group()) * 1
    return out


def functional_irecv(y: Tensor) -> Tensor:
    after, before = _neighbors()
    ops, name = torch.ops._c10d_functional, _group().group_name
    out = torch.empty_like(y)
    sent = ops.isend(y, after, 0, name)
    ops.wait_tensor(ops.irecv(out, before, 0, name))
    ops.wait_tensor(sent)
    return out


@torch.library.custom_op("autoac_bench::exchange", mutates_args=("out",))
def _exchange(out: Tensor, y: Tensor, group_name: str) -> None:
    dist.all_to_all_single(out, y.contiguous())


def custom_op(y: Tensor) -> Tensor:
    out = torch.empty_like(y)
    _exchange(out, y.detach(), _group().group_name)
    return out


_unmarked = torch.library.Library("deepep", "FRAGMENT")
_unmarked.define("bench_exchange(Tensor out, Tensor y) -> ()")


def _exchange_unmarked(out: Tensor, y: Tensor) -> None:
    dist.all_to_all_single(out, y.contiguous())


_unmarked.impl("bench_exchange", _exchange_unmarked, "CPU")


def unmarked_op(y: Tensor) -> Tensor:
    out = torch.empty_like(y)
    torch.ops.deepep.bench_exchange(out, y.detach())
    return out


COLLECTIVES: tuple[Callable[[Tensor], Tensor], ...] = (
    all_reduce,
    all_reduce_async,
    all_reduce_part,
    all_reduce_coalesced,
    broadcast,
    reduce,
    all_gather,
    all_gather_async,
    all_gather_views,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_into_tensor_coalesced,
    reduce_scatter,
    reduce_scatter_tensor,
    reduce_scatter_tensor_coalesced,
    all_to_all,
    all_to_all_single,
    gather,
    scatter,
    send_and_recv,
    recv_any_source,
    batch_isend_irecv,
    barrier,
    all_gather_object,
    functional_all_reduce,
    functional_all_reduce_in_place,
    functional_all_gather,
    functional_reduce_scatter,
    functional_all_to_all,
    functional_broadcast,
    functional_irecv,
    custom_op,
    unmarked_op,
)


# --- the network that one collective is part of -------------------------------------------------------------


class Communicate(torch.autograd.Function):
    """Run a collective forward, and sum the gradient over the ranks backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, collective: Callable[[Tensor], Tensor]) -> Tensor:
        return collective(y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad, None


class Network(nn.Module):
    """Ops that read the activations before and after a collective, which may write them in place.

    Sigmoid saves its output and sin its input. Both are what the collective overwrites, and autograd does not
    notice: no version counter moves. The plain backward computes with what the collective wrote.
    """

    def __init__(self, collective: Callable[[Tensor], Tensor], *, inside: bool, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.collective, self.inside, self.checkpointed = collective, inside, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        out = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return out.square().mean()

    def block(self, x: Tensor) -> Tensor:
        """Return activations of which the collective made a part."""
        y = torch.sigmoid(self.before(x))
        early = y.sin() + (y * 1.5).exp()
        z = Communicate.apply(y, self.collective) if self.inside else self.collective(y.detach())
        out: Tensor = self.after((early * z.exp()).tanh()) * z.cos() + y.square().tanh()
        return out


def _must_recompute(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


# A policy for the region around each step, or None.
WAYS: dict[str, Any] = {
    "apply": None,
    "pinned modules": None,
    "checkpoint": None,
    "recompute_all": "recompute_all",
    "MUST_RECOMPUTE": CheckpointPolicy.MUST_RECOMPUTE,
    "function": _must_recompute,
}


@dataclass(frozen=True)
class Step:
    """The results of one step."""

    tensors: list[Tensor]  # the loss and the gradients
    communicated: int  # by backward


def train(model: nn.Module, x: Tensor, policy: Any) -> list[Step]:
    """Run `STEPS` steps, each forward in a region under `policy` unless that is None."""
    steps = []
    for _ in range(STEPS):
        model.zero_grad()
        if policy is None:
            loss = model(x)
        else:
            with save_recompute_policy(policy):
                loss = model(x)
        before = _group()._get_sequence_number_for_group()
        loss.backward()
        communicated = _group()._get_sequence_number_for_group() - before
        gradients = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
        steps.append(Step([loss.detach().clone(), *gradients], communicated))
    return steps


def difference(plain: Sequence[Step], ours: Sequence[Step]) -> str:
    """Return "", or what `ours` has else than `plain`."""
    for number, (expected, found) in enumerate(zip(plain, ours, strict=True)):
        if expected.communicated != found.communicated:
            return f"step {number}: backward communicates {found.communicated} times"
        for i, (a, b) in enumerate(zip(expected.tensors, found.tensors, strict=True)):
            if not torch.equal(a, b):
                return f"step {number}: {f'gradient {i - 1}' if i else 'loss'}"
    return ""


def differences(collective: Callable[[Tensor], Tensor], ways: Sequence[str] = tuple(WAYS)) -> dict[str, str]:
    """Train with `collective` inside and outside of a Function; return the differences by way."""
    found = {}
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    for inside in (True, False):
        plain = train(Network(collective, inside=inside, checkpointed=False), x, None)
        for way in ways:
            model = Network(collective, inside=inside, checkpointed=way == "checkpoint")
            if way == "apply":
                ac_client.apply(model, 1.0, constraints=Constraints(pin_recompute=("*",)), group=None)
            if way == "pinned modules":
                ac_client.pin(model, "must_recompute")
                ac_client.apply(model, 1.0, group=None)
            where = f"{collective.__name__} {'inside' if inside else 'outside'}, {way}"
            found[where] = difference(plain, train(model, x, WAYS[way]))
            if way in ("apply", "pinned modules") and not ac_client.applied(model).report().recomputed:
                found[where] = found[where] or "nothing was recomputed"
    return found


# --- expert parallelism -------------------------------------------------------------------------------------

EXPERTS, MODEL_WIDTH, TOKENS = 4, 16, 32


class Exchange(torch.autograd.Function):
    """Send rows to their ranks and receive those of this rank; backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.splits = sent, received
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sent, received = ctx.splits
        out = grads[0].new_empty(sum(sent), grads[0].shape[1])
        dist.all_to_all_single(out, grads[0].contiguous(), sent, received)
        return out, None, None


class Experts(nn.Module):
    """A mixture of experts, of which each rank has some."""

    def __init__(self) -> None:
        super().__init__()
        self.n_local = EXPERTS // _size()
        self.router = nn.Linear(MODEL_WIDTH, EXPERTS, bias=False)
        self.norm = nn.LayerNorm(MODEL_WIDTH)
        self.up = nn.Parameter(torch.randn(self.n_local, MODEL_WIDTH, 2 * MODEL_WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(self.n_local, 2 * MODEL_WIDTH, MODEL_WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` plus what the expert of each token adds."""
        h = self.norm(x)
        weight, expert = self.router(h).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        sent = torch.bincount(expert, minlength=EXPERTS)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        to_each = sent.view(_size(), -1).sum(1).tolist()
        from_each = received.view(_size(), -1).sum(1).tolist()
        tokens = Exchange.apply(h[order], to_each, from_each)
        made = []
        for i, part in enumerate(tokens.split(received.tolist())):
            expert_of_part = i % self.n_local
            made.append(F.silu(part @ self.up[expert_of_part]) @ self.down[expert_of_part])
        back = Exchange.apply(torch.cat(made), from_each, to_each)
        out: Tensor = x + torch.zeros_like(h).index_copy(0, order, back) * weight[:, None]
        return out


class ExpertModel(nn.Module):
    """Two mixtures of experts with dense layers between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(MODEL_WIDTH, MODEL_WIDTH), nn.GELU(), Experts()) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def random_policy(found: Any, chance: random.Random) -> Policy:
    """Return a policy for the profile `found` with random op times, within a random budget."""
    times = tuple(chance.uniform(0.1, 100.0) for _ in found.ops.runtime_us)
    drawn = found.model_copy(update={"ops": found.ops.model_copy(update={"runtime_us": times})})
    graph = build(drawn)
    most = simulate(graph, graph.everything).peak.live_bytes
    budget = int(graph.static_bytes + chance.uniform(0.3, 1.0) * (most - graph.static_bytes))
    try:
        return plan(drawn, budget_bytes=budget).policy()
    except (InfeasibleBudget, SolverOutOfTime) as error:
        return plan(drawn, budget_bytes=error.smallest_found).policy()


def tried_experts(seed: int, repetitions: int) -> tuple[list[str], int]:
    """Return the differences of `repetitions` plans, and how many ops these recompute in all."""
    chance = random.Random(seed * 1000 + dist.get_rank())
    x = torch.randn(TOKENS, MODEL_WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    plain = train(ExpertModel(), x, None)
    found = profile(ExpertModel(), x)
    wrong, recomputed = [], 0
    for repetition in range(repetitions):
        model = ExpertModel()
        policy = random_policy(found, chance)
        ac_client.apply(model, policy=policy, strict=True)
        recomputed += policy.recomputed
        if differs := difference(plain, train(model, x, None)):
            wrong.append(f"experts, repetition {repetition}: {differs}")
    return wrong, recomputed


# --- ranks --------------------------------------------------------------------------------------------------


def _study(rank: int, world: int, store: str, seed: int, repetitions: int) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    begun = time.monotonic()
    wrong = []
    n_cases = 0
    for collective in COLLECTIVES:
        found = differences(collective)
        n_cases += len(found)
        wrong += [f"{where}: {differs}" for where, differs in found.items() if differs]
    of_experts, recomputed = tried_experts(seed, repetitions)
    wrong += of_experts
    for differs in wrong:
        print(f"rank {rank} of {world}: {differs}", flush=True)
    total = torch.tensor(len(wrong))
    dist.all_reduce(total)
    if rank == 0:
        seconds = time.monotonic() - begun
        print(
            f"{world} ranks: {len(COLLECTIVES)} collectives in {n_cases} cases, and {repetitions} plans of "
            f"experts ({recomputed} ops recomputed on rank 0): {int(total)} differences, {seconds:.0f} s",
            flush=True,
        )
    dist.destroy_process_group()
    if total:
        raise SystemExit(1)


def main() -> None:
    """Run the study on two and on four ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repetitions", type=int, default=500, help="plans of the experts (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for world in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            spawn(_study, (world, store, options.seed, options.repetitions), nprocs=world)


if __name__ == "__main__":
    main()
