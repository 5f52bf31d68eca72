"""Published models at their real sizes, on the meta device, each with a batch.

Parameters are bf16, and AdamW keeps its state in the type of the parameters: 8 bytes a parameter with its
gradient. Sizes are those of the published configurations, named next to each; batch and sequence length
are what fits one device's share of a usual training run, so that activations matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.mamba import modeling_mamba

from benchmarks.models.batches import Batch, ModelAndBatch
from benchmarks.models.dense_net import DenseNet
from benchmarks.models.gpt2 import gpt2
from benchmarks.models.selective_scan import selective_scan


@contextmanager
def weightless(dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Build modules with parameters of `dtype` on the meta device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def tokens(batch: int, length: int) -> Batch:
    """Return token ids that are also the labels; they have memory, so a model may read them."""
    ids = torch.ones(batch, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


LLAMA_3_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
LLAMA_3_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
LLAMA_3_405B = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128}


def llama(
    layers: int, *, batch: int = 1, length: int = 8192, widths: dict[str, int] = LLAMA_3_8B
) -> ModelAndBatch:
    """Build Llama 3 at the widths of meta-llama/Meta-Llama-3-8B, -70B, or Llama-3.1-405B, config.json."""
    config = transformers.LlamaConfig(
        **widths,
        vocab_size=128256,
        num_hidden_layers=layers,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        use_cache=False,
    )
    with weightless():
        return transformers.LlamaForCausalLM(config).train(), tokens(batch, length)


def images(batch: int, dtype: torch.dtype = torch.bfloat16) -> Batch:
    """Return RGB images of 224 x 224, and labels of 1,000 classes."""
    return {
        "pixel_values": torch.empty(batch, 3, 224, 224, dtype=dtype, device="meta"),
        "labels": torch.arange(batch) % 1000,
    }


def gpt2_xl(batch: int = 8, length: int = 1024) -> ModelAndBatch:
    """Build openai-community/gpt2-xl, config.json; its three dropouts are 0.1."""
    with weightless():
        return gpt2(layers=48, width=1600, heads=25), tokens(batch, length)


def vit_h14(batch: int = 64) -> ModelAndBatch:
    """Build google/vit-huge-patch14-224-in21k, config.json; 1,000 classes."""
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


def resnet(depths: list[int], batch: int = 256, dtype: torch.dtype = torch.bfloat16) -> ModelAndBatch:
    """Build microsoft/resnet-50 or -152, config.json, by the blocks of each stage."""
    config = transformers.ResNetConfig(
        hidden_sizes=[256, 512, 1024, 2048], depths=depths, layer_type="bottleneck", num_labels=1000
    )
    with weightless(dtype):
        return transformers.ResNetForImageClassification(config).train(), images(batch, dtype)


def densenet161(batch: int = 128, dtype: torch.dtype = torch.bfloat16) -> ModelAndBatch:
    """Build DenseNet-161 of the paper's authors: growth 48, 1,000 classes."""
    with weightless(dtype):
        model = DenseNet((6, 12, 36, 24), growth=48, stem=96).train()
    batches = images(batch, dtype)
    return model, {"images": batches["pixel_values"], "labels": batches["labels"]}


class Denoiser(nn.Module):
    """A U-Net of diffusers and its training loss."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, noisy: Tensor, timesteps: Tensor, text: Tensor, noise: Tensor) -> Tensor:
        predicted = self.unet(noisy, timesteps, text, return_dict=False)[0]
        return F.mse_loss(predicted.float(), noise.float())


def unet_sd15(batch: int = 16) -> ModelAndBatch:
    """Build the U-Net of Stable Diffusion 1.5 (unet/config.json): latents of 64 x 64, 77 tokens of text.

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


def mixtral_8x7b(batch: int = 1, length: int = 4096) -> ModelAndBatch:
    """Build mistralai/Mixtral-8x7B-v0.1, config.json, with grouped products, whose shapes ignore routing."""
    config = transformers.MixtralConfig(
        max_position_embeddings=32768,
        sliding_window=None,
        use_cache=False,
        experts_implementation="grouped_mm",
    )
    with weightless():
        return transformers.MixtralForCausalLM(config).train(), tokens(batch, length)


def deepseek_v3(batch: int = 1, length: int = 4096) -> ModelAndBatch:
    """Build deepseek-ai/DeepSeek-V3, config.json, without its prediction of a second token.

    61 layers, 58 of them with 256 experts. Grouped products take bf16 weights instead of fp8.
    """
    config = transformers.DeepseekV3Config(use_cache=False, experts_implementation="grouped_mm")
    with weightless():
        return transformers.DeepseekV3ForCausalLM(config).train(), tokens(batch, length)


def t5_3b(batch: int = 8, length: int = 512) -> ModelAndBatch:
    """Build google-t5/t5-3b, config.json; encoder and decoder see as many tokens."""
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


def mamba_2_8b(batch: int = 2, length: int = 2048) -> ModelAndBatch:
    """Build state-spaces/mamba-2.8b-hf, config.json; the scan is one op, as in mamba_ssm's kernel."""
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


def lstm(batch: int = 128, length: int = 256) -> ModelAndBatch:
    """Build four layers of 2,048, dropout 0.2, vocabulary 32,000; unrolled, since cuDNN's op is one block."""
    with weightless():
        return LSTM(32000, 2048, 4, 0.2).train(), tokens(batch, length)


MODELS: dict[str, Callable[[], ModelAndBatch]] = {
    "llama3_8b": partial(llama, 32),  # Llama 3 8B, 1 x 8192 tokens
    "llama3_70b": partial(llama, 80, widths=LLAMA_3_70B),  # Llama 3 70B, 1 x 8192 tokens
    "gpt2_xl": gpt2_xl,  # GPT-2 XL with dropout, 8 x 1024 tokens
    "vit_h14": vit_h14,  # ViT-H/14, 64 images of 224 x 224
    "resnet152": partial(resnet, [3, 8, 36, 3]),  # ResNet-152, 256 images of 224 x 224
    "densenet161": densenet161,  # DenseNet-161, 128 images of 224 x 224
    "unet_sd15": unet_sd15,  # Stable Diffusion 1.5's U-Net, 16 latents of 64 x 64
    "t5_3b": t5_3b,  # T5-3B, 8 x (512 + 512) tokens
    "mamba_2_8b": mamba_2_8b,  # Mamba 2.8B, 2 x 2048 tokens
    "lstm": lstm,  # LSTM, 4 layers of 2048, 128 x 256 tokens
    "llama_l16": partial(llama, 16),  # Llama 3 8B's widths, 16 layers, 1 x 8192 tokens
    "llama_l32": partial(llama, 32),  # Llama 3 8B's widths, 32 layers, 1 x 8192 tokens
    "llama_l64": partial(llama, 64),  # Llama 3 8B's widths, 64 layers, 1 x 8192 tokens
    "llama_l128": partial(llama, 128),  # Llama 3 8B's widths, 128 layers, 1 x 8192 tokens
    "llama_l464": partial(llama, 464),  # Llama 3 8B's widths, 464 layers: 19,521 storages
}

OVER_MANY_DEVICES: dict[str, Callable[[], ModelAndBatch]] = {
    "mixtral_8x7b": mixtral_8x7b,  # Mixtral 8x7B, 1 x 4096 tokens
    "deepseek_v3": deepseek_v3,  # DeepSeek-V3, 1 x 4096 tokens
    "llama_405b": partial(llama, 126, widths=LLAMA_3_405B),  # Llama 3.1 405B, 1 x 8192 tokens
}
"""Models that no single device trains: on one, the optimizer's step is the peak, and no budget binds."""


def bert_large_config() -> transformers.BertConfig:
    """Return the settings of BERT-large, with attention as its authors wrote it."""
    return transformers.BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
    )
