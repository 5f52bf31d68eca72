"""Test that ranks which each observe their own first step train as unplanned ranks do, under one plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import outputs_of_ranks

SCRIPT = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import ac_client
from autoac.planner import InfeasibleBudget
from benchmarks.models.tiny import ZOO
from rank_setups import Collectives
from benchmarks.steps import loss_of

entry = ZOO[1]  # a Llama
assert entry.name == "Llama"

def made(kind):
    torch.manual_seed(0)
    model = entry.make().train()
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("replicate", "shard"))
    how = {"mesh": mesh} if kind == "hsdp" else {}
    for block in model.model.layers:
        fully_shard(block, **how)
    return fully_shard(model, **how)

def batch_of(step):
    batch = entry.batch()
    if step > 2:  # of another length on each rank, in steps that each rank observes alone
        batch = {name: value[:, : 20 + step % 4 + rank] for name, value in batch.items()}
    return batch

def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, counts = [], []
    for step in range(10):
        with Collectives() as collectives:
            optimizer.zero_grad()
            loss = loss_of(model(**batch_of(step)))
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        counts.append(collectives.count)
    return losses, counts, [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]

losses, counts, weights = train(made(KIND))
planned = made(KIND)
ac_client.apply(planned, budget_gb=BUDGET / 2**30)
ours, our_counts, our_weights = train(planned)
assert ours == losses, (ours, losses)
assert our_counts[2:] == counts[2:], (our_counts, counts)  # the ranks meet in the first two steps
assert all(map(torch.equal, our_weights, weights))
policy = ac_client.applied(planned).policy
assert policy.recomputed > 0
assert policy.predicted.peak_bytes <= BUDGET
first = next(one.policy for one in ac_client.applied(planned).policies.buckets)
print(first.fingerprint, first.predicted.peak_bytes)

planned = made(KIND)
ac_client.apply(planned, budget_gb=BUDGET / 2**30)
batch = entry.batch()
if rank == 0:  # only its batch does not fit
    batch = {name: torch.cat([value] * 3, 1) for name, value in batch.items()}
try:
    for step in range(2):
        loss_of(planned(**batch)).backward()
except InfeasibleBudget:
    assert step == 1
else:
    raise AssertionError("a rank has raised no error")
dist.barrier()
"""


@pytest.mark.parametrize(
    ("kind", "mesh", "budget"),
    [("ddp", (2, 1), 420_000), ("hsdp", (2, 2), 370_000)],
)
def test_ranks_that_observe_their_first_step_train_as_unplanned_ranks(
    kind: str, mesh: tuple[int, int], budget: int, tmp_path: Path
) -> None:
    script = SCRIPT.replace("KIND", repr(kind)).replace("MESH", repr(mesh)).replace("BUDGET", str(budget))
    outputs = outputs_of_ranks(script, tmp_path / "store", mesh[0] * mesh[1])
    assert len(outputs) == mesh[0] * mesh[1]
    assert len(set(outputs)) == 1, "ranks have other plans"
