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
from benchmarks.models.tiny import ZOO
from benchmarks.step_timing import loss_of

entry = ZOO[1]  # a Llama
assert entry.name == "Llama"

def made(kind):
    torch.manual_seed(0)
    model = entry.make().train()
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    how = {"mesh": mesh} if kind == "hsdp" else {}
    for block in model.model.layers:
        fully_shard(block, **how)
    return fully_shard(model, **how)

def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(5):
        batch = entry.batch()
        if step > 2:  # of another length on each rank, in steps that each rank observes alone
            batch = {name: value[:, : 20 + step + rank] for name, value in batch.items()}
        optimizer.zero_grad()
        loss = loss_of(model(**batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]

losses, weights = train(made(KIND))
planned = made(KIND)
ac_client.apply(planned, budget_gb=BUDGET / 2**30)
ours, our_weights = train(planned)
assert ours == losses, (ours, losses)
assert all(map(torch.equal, our_weights, weights))
policy = ac_client.applied(planned).policy
assert policy.recomputed > 0
assert policy.predicted.peak_bytes <= BUDGET
print(policy.predicted.peak_bytes)
"""


@pytest.mark.parametrize(
    ("kind", "world", "budget"), [("ddp", 2, 420_000), ("fsdp", 2, 370_000), ("hsdp", 4, 370_000)]
)
def test_ranks_that_observe_their_first_step_train_as_unplanned_ranks(
    kind: str, world: int, budget: int, tmp_path: Path
) -> None:
    script = SCRIPT.replace("KIND", repr(kind)).replace("BUDGET", str(budget))
    assert len(outputs_of_ranks(script, tmp_path / "store", world)) == world
