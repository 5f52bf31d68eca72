"""Run a plain loop under a memory budget for the length of a with-block.

python examples/loops/plain.py
"""

import torch
from torch import nn

from ac_client.integrations.loop import planned


def build_model() -> nn.Module:
    layer = [nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*(module for _ in range(6) for module in layer))


def main() -> None:
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with planned(model, budget_gb=0.004, optimizer=optimizer) as plan:  # removed after the block
        for step in range(6):
            x = torch.randn(512 if step < 5 else 100, 128)  # the last batch is short
            loss = nn.functional.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(plan.report())
    print(plan.report().metrics())  # numbers for a logger


if __name__ == "__main__":
    main()
