"""Test checkpoints under DistributedDataParallel: no "Expected to mark a variable ready only once"."""

from __future__ import annotations

import json
from pathlib import Path

from ranks import outputs_of_ranks

SCRIPT = """
import json
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint
import ac_client

class CalledTwice(nn.Module):
    "One block that runs twice, each time in a checkpoint of its own."

    def __init__(self, checkpoint):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.unused = nn.Linear(8, 8)
        self.checkpoint = checkpoint

    def forward(self, x):
        return self.checkpoint(self.block, self.checkpoint(self.block, x)).sum()

def step(checkpoint, planned=False):
    "Return the gradients, averaged over the ranks, or the error."
    torch.manual_seed(0)
    model = DistributedDataParallel(CalledTwice(checkpoint), find_unused_parameters=True)
    if planned:
        ac_client.apply(model, 1.0)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    try:
        model(x).backward()
    except RuntimeError as error:
        return str(error)
    return [p.grad.tolist() for p in model.module.block.parameters()]

def plain(function, x):
    return function(x)

def reentrant(function, x):
    return torch_checkpoint(function, x, use_reentrant=True)

print(json.dumps({
    "plain": step(plain),
    "ours": step(ac_client.checkpoint),
    "planned": step(plain, planned=True),
    "taken over": step(reentrant, planned=True),
    "reentrant": step(reentrant),
}))
"""


def test_parameters_of_checkpoints_are_marked_ready_once_under_ddp(tmp_path: Path) -> None:
    for out in outputs_of_ranks(SCRIPT, tmp_path / "store"):
        results = json.loads(out)
        assert "Expected to mark a variable ready only once" in results["reentrant"]
        assert isinstance(results["plain"], list)
        assert results["ours"] == results["plain"]
        assert results["planned"] == results["plain"]
        assert results["taken over"] == results["plain"]
