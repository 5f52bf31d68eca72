"""Models that people train, at the size at which they train them, on the meta device.

Parameters are bf16, and AdamW keeps its state in the type of the parameters: 8 bytes a parameter with its
gradient. Sizes are those of the published configurations, named beside each; batch and sequence length
are what fits one device's share of a usual training run, so that activations matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.mamba import modeling_mamba

from benchmarks.plans.scan import selective_scan

Batch = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A model and one batch; `make` builds both, without memory for either."""

    words: str  # what it is, and the batch
    make: Callable[[], tuple[nn.Module, Batch]]


@contextmanager
def weightless() -> Iterator[None]:
    """Modules built inside have bf16 parameters on the meta device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def tokens(batch: int, length: int) -> Batch:
    """Token ids, which are their own labels. Known, so that a model may look at them."""
    ids = torch.ones(batch, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def llama(layers: int, *, batch: int = 1, length: int = 8192, large: bool = False) -> tuple[nn.Module, Batch]:
    """Llama 3 at the widths of 8B (of 70B if `large`): meta-llama/Meta-Llama-3-8B, -70B, config.json."""
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=8192 if large else 4096,
        intermediate_size=28672 if large else 14336,
        num_hidden_layers=layers,
        num_attention_heads=64 if large else 32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        use_cache=False,
    )
    with weightless():
        return transformers.LlamaForCausalLM(config).train(), tokens(batch, length)


def images(batch: int, classes: int = 1000) -> Batch:
    """RGB images of 224 x 224, of bf16."""
    return {
        "pixel_values": torch.empty(batch, 3, 224, 224, dtype=torch.bfloat16, device="meta"),
        "labels": torch.arange(batch) % classes,
    }


def gpt2_xl(batch: int = 8, length: int = 1024) -> tuple[nn.Module, Batch]:
    """openai-community/gpt2-xl, config.json; its three dropouts at 0.1."""
    config = transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25, use_cache=False)
    with weightless():
        return transformers.GPT2LMHeadModel(config).train(), tokens(batch, length)


def vit_h14(batch: int = 64) -> tuple[nn.Module, Batch]:
    """google/vit-huge-patch14-224-in21k, config.json; 1,000 classes."""
    config = transformers.ViTConfig(
        hidden_size=1280,
        num_hidden_layers=32,
        num_attention_heads=16,
        intermediate_size=5120,
        patch_size=14,
        image_size=224,
        num_labels=1000,
    )
    with weightless():
        return transformers.ViTForImageClassification(config).train(), images(batch)


def resnet152(batch: int = 256) -> tuple[nn.Module, Batch]:
    """microsoft/resnet-152, config.json."""
    config = transformers.ResNetConfig(
        hidden_sizes=[256, 512, 1024, 2048], depths=[3, 8, 36, 3], layer_type="bottleneck", num_labels=1000
    )
    with weightless():
        return transformers.ResNetForImageClassification(config).train(), images(batch)


class Denoiser(nn.Module):
    """A U-Net of diffusers and the loss that it is trained with."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, noisy: Tensor, timesteps: Tensor, text: Tensor, noise: Tensor) -> Tensor:
        predicted = self.unet(noisy, timesteps, text, return_dict=False)[0]
        return F.mse_loss(predicted.float(), noise.float())


def unet_sd15(batch: int = 16) -> tuple[nn.Module, Batch]:
    """The U-Net of Stable Diffusion 1.5 (unet/config.json): latents of 64 x 64, 77 tokens of text.

    Needs diffusers: `pip install --no-deps diffusers requests urllib3 charset_normalizer certifi
    importlib_metadata zipp pillow`, which leaves torch as it is.
    """
    from diffusers import UNet2DConditionModel

    with weightless():
        unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
        latents = torch.empty(batch, 4, 64, 64)
        text = torch.empty(batch, 77, 768)
    timesteps = torch.arange(batch) * 1000 // batch
    return Denoiser(unet).train(), {"noisy": latents, "timesteps": timesteps, "text": text, "noise": latents}


def mixtral_8x7b(batch: int = 1, length: int = 4096) -> tuple[nn.Module, Batch]:
    """mistralai/Mixtral-8x7B-v0.1, config.json. Experts by grouped products, whose shapes know no routing."""
    config = transformers.MixtralConfig(
        max_position_embeddings=32768,
        sliding_window=None,
        use_cache=False,
        experts_implementation="grouped_mm",
    )
    with weightless():
        return transformers.MixtralForCausalLM(config).train(), tokens(batch, length)


def t5_3b(batch: int = 8, length: int = 512) -> tuple[nn.Module, Batch]:
    """google-t5/t5-3b, config.json; as many tokens on the decoder's side as on the encoder's."""
    config = transformers.T5Config(
        d_model=1024,
        d_ff=16384,
        d_kv=128,
        num_layers=24,
        num_heads=32,
        decoder_start_token_id=0,
        use_cache=False,
    )
    with weightless():
        return transformers.T5ForConditionalGeneration(config).train(), tokens(batch, length)


def mamba_2_8b(batch: int = 2, length: int = 2048) -> tuple[nn.Module, Batch]:
    """state-spaces/mamba-2.8b-hf, config.json; the scan as mamba_ssm's kernel, one op (scan.py)."""
    modeling_mamba.mamba_selective_scan = selective_scan
    config = transformers.MambaConfig(
        vocab_size=50280,
        hidden_size=2560,
        intermediate_size=5120,
        num_hidden_layers=64,
        time_step_rank=160,
        use_cache=False,
    )
    with weightless():
        return transformers.MambaForCausalLM(config).train(), tokens(batch, length)


class LSTM(nn.Module):
    """A language model of stacked LSTM cells, one token after another, with dropout between layers."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(vocabulary, width)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        inputs = self.dropout(self.embedding(input_ids)).unbind(1)
        zeros = inputs[0].new_zeros(len(input_ids), self.width)
        states = [(zeros, zeros)] * len(self.cells)
        outputs = []
        for x in inputs:
            for i, cell in enumerate(self.cells):
                states[i] = cell(x, states[i])
                x = self.dropout(states[i][0])
            outputs.append(x)
        logits = self.head(torch.stack(outputs, 1))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def lstm(batch: int = 128, length: int = 256) -> tuple[nn.Module, Batch]:
    """Four layers of 2,048, dropout 0.2, a vocabulary of 32,000: unrolled, since cuDNN's op is one block."""
    with weightless():
        return LSTM(32000, 2048, 4, 0.2).train(), tokens(batch, length)


MODELS = {
    "llama3_8b": Case("Llama 3 8B, 1 x 8192 tokens", partial(llama, 32)),
    "llama3_70b": Case("Llama 3 70B, 1 x 8192 tokens", partial(llama, 80, large=True)),
    "gpt2_xl": Case("GPT-2 XL with dropout, 8 x 1024 tokens", gpt2_xl),
    "vit_h14": Case("ViT-H/14, 64 images of 224 x 224", vit_h14),
    "resnet152": Case("ResNet-152, 256 images of 224 x 224", resnet152),
    "unet_sd15": Case("Stable Diffusion 1.5's U-Net, 16 latents of 64 x 64", unet_sd15),
    "mixtral_8x7b": Case("Mixtral 8x7B, 1 x 4096 tokens", mixtral_8x7b),
    "t5_3b": Case("T5-3B, 8 x (512 + 512) tokens", t5_3b),
    "mamba_2_8b": Case("Mamba 2.8B, 2 x 2048 tokens", mamba_2_8b),
    "lstm": Case("LSTM, 4 layers of 2048, 128 x 256 tokens", lstm),
    "llama_l16": Case("Llama 3 8B's widths, 16 layers, 1 x 8192 tokens", partial(llama, 16)),
    "llama_l32": Case("Llama 3 8B's widths, 32 layers, 1 x 8192 tokens", partial(llama, 32)),
    "llama_l64": Case("Llama 3 8B's widths, 64 layers, 1 x 8192 tokens", partial(llama, 64)),
    "llama_l128": Case("Llama 3 8B's widths, 128 layers, 1 x 8192 tokens", partial(llama, 128)),
    "llama_l464": Case("Llama 3 8B's widths, 464 layers: 19,521 storages", partial(llama, 464)),
}
