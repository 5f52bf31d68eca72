"""Run Lightning's Trainer under a memory budget with one callback. The plan includes the loss.

python examples/loops/with_lightning.py
"""

import lightning.pytorch as lp
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ac_client.integrations.lightning import AutoACCallback


class AutoEncoder(lp.LightningModule):
    """Linear layers with dropout that learn to reproduce their input."""

    def __init__(self) -> None:
        super().__init__()
        layer = [nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)]
        self.layers = nn.Sequential(*(module for _ in range(6) for module in layer))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        loss = nn.functional.mse_loss(self.layers(x), x)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(2148, 128)), batch_size=512)
    callback = AutoACCallback(budget_gb=0.004, measure=True)  # the one line
    trainer = lp.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(AutoEncoder(), loader)
    print(callback.report)


if __name__ == "__main__":
    main()
