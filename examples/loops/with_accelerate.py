"""Run a loop under accelerate and a memory budget: prepare first, then plan.

accelerate launch examples/loops/with_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ac_client.integrations.accelerate import planned


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    layer = [nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)]
    model = nn.Sequential(*(module for _ in range(6) for module in layer))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(2148, 128)), batch_size=512)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with planned(accelerator, model, budget_gb=0.004, optimizer=optimizer) as plan:
        for step, (x,) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), x)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.log(plan.report().metrics(), step=step)  # to the trackers, if there are any
    accelerator.print(plan.report())


if __name__ == "__main__":
    main()
