"""A transformers model with `tp_plan` or a `DistributedConfig` is planned on its mesh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import outputs_of_ranks

SCRIPT = """
import json, os
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
import ac_client
from autoac.planner import InfeasibleBudget
os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
folder = store + "-model"
if rank == 0:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, vocab_size=96, use_cache=False)).save_pretrained(folder)
dist.barrier()

def trained(budget_gb=None):
    model = LlamaForCausalLM.from_pretrained(folder, {how}).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget_gb is not None:
        ac_client.apply(model, budget_gb, optimizer=optimizer)
    for number in range(3):
        ids = torch.randint(0, 96, (4, 64), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    weights = [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]
    return model, weights

try:
    trained(1e-6)
except InfeasibleBudget as error:
    smallest = error.smallest_found
plain, want = trained()
model, weights = trained(1.2 * smallest / 2**30)  # a thread of gloo frees unseen, in either profile
at = ac_client.applied(model)
print(json.dumps({
    "kind": type(plain.model.layers[0].mlp.up_proj.weight).__name__,
    "equal": all(map(torch.equal, weights, want)),
    "recomputed": at.report().recomputed,
    "ranks": at.policy.tools["ranks"],
    "saves": at.policy.predicted.save_all_peak_bytes / smallest,
}))
"""


@pytest.mark.parametrize(
    ("how", "world", "mesh"),
    [
        ('tp_plan="auto"', 2, "2 (mesh tp 2)"),
        ("distributed_config=DistributedConfig(fsdp_size=2)", 2, "2 (mesh fsdp 2)"),
        (
            "distributed_config=DistributedConfig(fsdp_size=2, tp_size=2)",
            4,
            "4 (mesh fsdp 2 x tp 2, mesh fsdp 2)",
        ),
    ],
    ids=["tp_plan", "fsdp", "fsdp and tp"],
)
def test_model_that_transformers_distributes_is_recomputed_below_its_dtensors(
    how: str, world: int, mesh: str, tmp_path: Path
) -> None:
    script = SCRIPT.replace("{how}", how)
    for out in outputs_of_ranks(script, tmp_path / "store", world, timeout=300):
        facts = json.loads(out.splitlines()[-1])
        assert facts["kind"] == "DTensor"
        assert facts["equal"]
        assert facts["recomputed"] > 0
        assert facts["ranks"] == mesh
        assert facts["saves"] > 1.5
