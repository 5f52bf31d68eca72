"""Test compiled planned models on two ranks: DDP around a compiled model, FSDP around compiled blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import outputs_of_ranks

SCRIPT = """
import hashlib
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
import ac_client

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)).exp())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

def ddp(model):
    return torch.compile(DistributedDataParallel(model), backend="aot_eager"), model

def fsdp(model):
    for block in model.blocks:
        fully_shard(block)
        block.compile(backend="aot_eager")
    return fully_shard(model), model

def gradients(planned):
    torch.compiler.reset()
    call, model = KIND(Net())
    if planned:
        ac_client.apply(model, BUDGET_GB)
    torch.manual_seed(rank)
    for _ in range(2):
        call(torch.randn(512, 32)).backward()
    found = [p.grad for p in model.parameters()]
    found = [g.full_tensor() if isinstance(g, DTensor) else g for g in found]
    if planned:
        report = ac_client.applied(model).report()
        assert not report.off_path, report.off_path
        print("recomputed", report.recomputed)
    return found

want = gradients(False)
got = gradients(True)
assert all(map(torch.equal, got, want))
print("same")
"""


@pytest.mark.parametrize(("kind", "budget_gb"), [("ddp", 0.0016), ("fsdp", 0.0012)])
def test_two_ranks_have_the_gradients_of_two_unplanned_ranks(
    kind: str, budget_gb: float, tmp_path: Path
) -> None:
    script = SCRIPT.replace("KIND", kind).replace("BUDGET_GB", str(budget_gb))
    for out in outputs_of_ranks(script, tmp_path / "store"):
        assert out.splitlines()[-1] == "same"
        assert int(out.split("recomputed ")[1].split()[0]) > 0
