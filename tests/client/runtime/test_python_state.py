"""Test that what a block reads besides tensors is read once, in forward, in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepping import smallest_found, trained
from torch import Tensor, nn

import ac_client

SCALE = 0.0


class Shared:
    """An object that all blocks refer to."""

    scale = 0.0


class Block(nn.Module):
    """A block of four ops, scaled by what `read` returns."""

    def __init__(self, read: Callable[[Shared], float], shared: Shared) -> None:
        super().__init__()
        self.read, self.shared = read, shared
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = self.up(x) * (1.0 + self.read(self.shared))
        return x + self.down(nn.functional.gelu(up))


class Model(nn.Module):
    """Set the scale by `write` before each block."""

    def __init__(self, write: Callable[[Shared, float], Any], read: Callable[[Shared], float]) -> None:
        super().__init__()
        self.write, self.shared = write, Shared()
        self.blocks = nn.ModuleList(Block(read, self.shared) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            self.write(self.shared, 0.5 * i)
            x = block(x)
        return x.square().mean()


def set_global(_shared: Shared, scale: float) -> None:
    global SCALE
    SCALE = scale


CELLS = [0.0]

STATES: dict[str, tuple[Callable[[Shared, float], Any], Callable[[Shared], float]]] = {
    "attribute": (lambda shared, scale: setattr(shared, "scale", scale), lambda shared: shared.scale),
    "class": (lambda _, scale: setattr(Shared, "scale", scale), lambda shared: shared.scale),
    "list": (lambda _, scale: CELLS.__setitem__(0, scale), lambda _: CELLS[0]),
    "global": (set_global, lambda _: SCALE),
}


def gradients(state: str, budget: int | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model(*STATES[state])
    if budget is not None:
        ac_client.apply(model, budget_gb=budget / 2**30)
    return trained(model, lambda _: torch.randn(64, 32))


@pytest.mark.parametrize("state", STATES)
def test_block_reads_state_that_its_model_changes_as_in_forward(state: str) -> None:
    planned = gradients(state, int(1.002 * smallest_found(lambda: gradients(state, 1000))))
    assert all(map(torch.equal, planned, gradients(state, None)))
