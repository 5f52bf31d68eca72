"""Build GPT-2 of any size."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn


def gpt2(
    *, layers: int, width: int, heads: int, vocabulary: int = 50257, positions: int = 1024, **options: Any
) -> nn.Module:
    """Return GPT-2 of `transformers` with a language-model head and random weights, in training mode.

    Args:
        options: further fields of `GPT2Config`.
    """
    tokens = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=positions,
        **(tokens | options),
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config).train()
    return model
