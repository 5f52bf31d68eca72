"""Fit a training step into a memory budget with one line.

    python examples/one_line.py

Train a small transformer for a few steps: first plain, then with a budget of 60 % of the plain peak.
"""

import torch
from torch import Tensor, nn

import ac_client
from ac_client.measure.memory_timeline import AllocatorTimeline


class SmallTransformer(nn.Module):
    """A decoder-like stack: embedding, encoder layers under a causal mask, and a loss."""

    def __init__(self, vocabulary: int = 512, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=causal, is_causal=True)
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Run an ordinary training loop."""
    for _ in range(steps):
        loss = model(torch.randint(512, (8, 128)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    torch.manual_seed(0)
    with AllocatorTimeline() as timeline:  # reads PyTorch's allocator
        model = SmallTransformer()
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, steps=2)
    print(f"plain: {timeline.peak_bytes / 2**20:.1f} MiB")

    budget_gb = 0.6 * timeline.peak_bytes / 2**30

    model = SmallTransformer()
    optimizer = torch.optim.AdamW(model.parameters())
    model = ac_client.apply(model, budget_gb, optimizer=optimizer)  # the one line
    train(model, optimizer, steps=2)
    with ac_client.applied(model).measure():
        train(model, optimizer, steps=2)
    print(ac_client.applied(model).report())


if __name__ == "__main__":
    main()
