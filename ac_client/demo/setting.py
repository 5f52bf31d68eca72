"""Build the model that the demo trains: GPT-2 with random weights, and token ids from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Setting:
    """Size of the demo's model and batch.

    With the default, a step takes a tenth of a second: a minute has many of them.
    """

    layers: int = 3
    width: int = 256
    heads: int = 4
    vocabulary: int = 512
    batch: int = 1
    tokens: int = 256
    dropout: float = 0.1
    seed: int = 0
    keep_gradients: bool = True  # between steps, zeroed; else they are freed

    def describe(self) -> str:
        """Describe the setting in one line."""
        return (
            f"GPT-2, {self.layers} layers of width {self.width}, dropout {self.dropout:g}, "
            f"vocabulary {self.vocabulary}, batch {self.batch} x {self.tokens} tokens, SGD"
        )


TINY = Setting(layers=2, width=32, heads=2, vocabulary=64, batch=2, tokens=16)
"""For tests: the same code in a second."""


def build_model(setting: Setting) -> nn.Module:
    """Build the model in training mode; the same setting gives the same weights."""
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


def block_paths(setting: Setting) -> list[str]:
    """Return the path of each transformer block in GPT-2: `transformer.h.0`, `transformer.h.1`, ..."""
    return [f"transformer.h.{i}" for i in range(setting.layers)]


def blocks(model: nn.Module, setting: Setting) -> list[nn.Module]:
    """Return the transformer blocks of `model`."""
    return [model.get_submodule(path) for path in block_paths(setting)]


def make_batch(setting: Setting) -> Tensor:
    """Return token ids, the same for every row and step."""
    generator = torch.Generator().manual_seed(setting.seed + 1)
    return torch.randint(setting.vocabulary, (setting.batch, setting.tokens), generator=generator)
