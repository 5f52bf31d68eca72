"""Train models that communicate in forward, plainly and with recompute, on two and on four ranks.

    make bench-collectives

Each collective of torch.distributed runs in a small network, in an autograd.Function and outside of one,
under every way to recompute. Each plan recomputes all that it may, so no clock decides what is tested. Losses
and gradients must equal the plain ones bit for bit, and backward must communicate as often as the plain one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import outputs_of_ranks
from stepping import functions_of
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.utils.checkpoint import CheckpointPolicy

import ac_client
from ac_client import Constraints, checkpoint, save_recompute_policy

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
    with distributed_c10d._coalescing_manager():
        for out, each in zip(outs, (y, y.exp()), strict=True):
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
    return y * sum(one["rank"] for one in received)


def functional_all_reduce(y: Tensor) -> Tensor:
    return functional.all_reduce(y, "sum", _group()) * 1


def functional_all_reduce_in_place(y: Tensor) -> Tensor:
    torch.ops._c10d_functional.all_reduce_(y, "sum", _group().group_name)
    return torch.ops._c10d_functional.wait_tensor(y)


def functional_all_gather(y: Tensor) -> Tensor:
    return functional.all_gather_tensor(y, 0, _group())[-ROWS:] * 1


def functional_reduce_scatter(y: Tensor) -> Tensor:
    return _spread(functional.reduce_scatter_tensor(y, "sum", 0, _group()) * 1)


def functional_all_to_all(y: Tensor) -> Tensor:
    return functional.all_to_all_single(y, None, None, _group()) * 1


def functional_broadcast(y: Tensor) -> Tensor:
    return functional.broadcast(y, 0, _group()) * 1


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


COLLECTIVES = functions_of(globals(), "y")


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
        return self.after((early * z.exp()).tanh()) * z.cos() + y.square().tanh()


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
        with nullcontext() if policy is None else save_recompute_policy(policy):
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


SCRIPT = """
import json
from fuzzers.collectives import COLLECTIVES, differences
found = {}
for collective in COLLECTIVES:
    found |= differences(collective)
wrong = [f"{where}: {differs}" for where, differs in found.items() if differs]
print(json.dumps([len(found), wrong]))
"""


def main() -> None:
    """Run the study on two and on four ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    failures = 0
    for world in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            outs = outputs_of_ranks(SCRIPT, Path(folder) / "store", world, timeout=3600)
        for rank, (cases, wrong) in enumerate(map(json.loads, outs)):
            print(f"rank {rank} of {world}: {cases} cases", *wrong, sep="\n")
            failures += len(wrong)
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
