"""Plan with a service, `autoac serve` in another process, through the same one line.

    python examples/with_service.py http://127.0.0.1:8421    # a running service
    python examples/with_service.py                          # starts one on a free port, and stops it

Train a small model whose policy comes from the service.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

import ac_client


@contextmanager
def service() -> Iterator[str]:
    """Start a planning service for the block; yield its address."""
    server = subprocess.Popen(
        [sys.executable, "-m", "ac_client.cli.main", "serve", "--port", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        output = []
        for line in server.stderr:
            output.append(line)
            if match := re.search(r"http://127\.0\.0\.1:\d+", line):
                yield match.group()
                return
        raise RuntimeError("the service did not start:\n" + "".join(output))
    finally:
        server.terminate()
        server.communicate()


class Model(nn.Module):
    """Linear layers with dropout, and a loss."""

    def __init__(self, width: int = 256, layers: int = 8) -> None:
        super().__init__()
        layer = [nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)]
        self.layers = nn.Sequential(*(module for _ in range(layers) for module in layer))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), x)


def main(running: str | None = None) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with nullcontext(running) if running else service() as url:
        ac_client.apply(model, budget_gb=0.016, optimizer=optimizer, service=url)  # the one line
        for _ in range(3):
            loss = model(torch.randn(1024, 256))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    planned = ac_client.applied(model)
    print(planned.report())
    if running and planned.policy is not None:
        print(f"In a browser: {running}/profiles/{planned.policy.profile_digest}")


if __name__ == "__main__":
    main(*sys.argv[1:])
