"""The model that the demo trains: GPT-2 from a config, random weights, token ids made on the spot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the parent process needs no torch
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained. docs/cli.md says why these numbers."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 8192
    batch: int = 1
    tokens: int = 256
    dropout: float = 0.1
    seed: int = 0
    keep_gradients: bool = True  # between steps, zeroed; else they are freed

    def describe(self) -> str:
        """The setting in one line."""
        return (
            f"GPT-2, {self.layers} layers of width {self.width}, dropout {self.dropout:g}, "
            f"vocabulary {self.vocabulary}, batch {self.batch} x {self.tokens} tokens, SGD"
        )


TINY = Setting(layers=2, width=32, heads=2, vocabulary=64, batch=2, tokens=16)
"""For tests: the same code in a second."""


def build_model(setting: Setting) -> nn.Module:
    """The model in training mode; the same weights for the same setting."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(setting.seed)
    config = transformers.GPT2Config(
        n_layer=setting.layers,
        n_embd=setting.width,
        n_head=setting.heads,
        n_positions=setting.tokens,
        vocab_size=setting.vocabulary,
        resid_pdrop=setting.dropout,
        embd_pdrop=setting.dropout,
        attn_pdrop=setting.dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model.train()


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD: it has no state, so what a budget is about are activations and gradients."""
    import torch

    return torch.optim.SGD(model.parameters(), lr=1e-3)


def block_paths(setting: Setting) -> list[str]:
    """The module paths of the transformer blocks."""
    return [f"transformer.h.{i}" for i in range(setting.layers)]


def blocks(model: nn.Module, setting: Setting) -> list[nn.Module]:
    """The transformer blocks."""
    return [model.get_submodule(path) for path in block_paths(setting)]


def make_batch(setting: Setting) -> Tensor:
    """Token ids, the same for every row and step."""
    import torch

    generator = torch.Generator().manual_seed(setting.seed + 1)
    return torch.randint(setting.vocabulary, (setting.batch, setting.tokens), generator=generator)
