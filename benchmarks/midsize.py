"""The zoo's architectures at a size whose step takes about a second on one core of a CPU.

Vocabularies and numbers of classes are small, so that a step's outputs are a small part of its memory.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Made = tuple[nn.Module, dict[str, Any]]
"""A model in training mode, and the keyword arguments of one step."""

VOCABULARY = 256

WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
}


def zoo() -> Any:
    """The module tests/zoo.py: tests and benchmarks are to speak of the same architectures."""
    tests = str(Path(__file__).parents[1] / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    return importlib.import_module("zoo")


def tokens(batch: int, length: int) -> dict[str, Tensor]:
    ids = torch.arange(batch * length).mul(7919).remainder(VOCABULARY - 3).reshape(batch, length)
    return {"input_ids": ids, "labels": ids}


def images(batch: int, size: int) -> dict[str, Tensor]:
    return {"pixel_values": wave(batch, 3, size, size), "labels": torch.arange(batch).remainder(2)}


def wave(*shape: int) -> Tensor:
    """Numbers in [-1, 1]."""
    return torch.linspace(-9, 9, torch.Size(shape).numel()).sin().reshape(shape)


def gpt2() -> Made:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=256,
        n_embd=256,
        n_layer=6,
        n_head=8,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config), tokens(8, 256)


def llama() -> Made:
    config = transformers.LlamaConfig(**WIDE, vocab_size=VOCABULARY, num_key_value_heads=2, use_cache=False)
    return transformers.LlamaForCausalLM(config), tokens(6, 256)


def bert() -> Made:
    config = transformers.BertConfig(**WIDE, vocab_size=VOCABULARY, max_position_embeddings=256)
    ids = tokens(8, 256)["input_ids"]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(8).remainder(2)}
    batch["attention_mask"][1::2, 200:] = 0
    return transformers.BertForSequenceClassification(config), batch


def t5() -> Made:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=256,
        d_ff=1024,
        d_kv=32,
        num_layers=3,
        num_heads=8,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config), tokens(8, 192)


def vit() -> Made:
    config = transformers.ViTConfig(**WIDE, image_size=96, patch_size=8, hidden_dropout_prob=0.1)
    return transformers.ViTForImageClassification(config), images(12, 96)


def mixtral() -> Made:
    wide = WIDE | {"intermediate_size": 512, "num_hidden_layers": 4}
    config = transformers.MixtralConfig(
        **wide, vocab_size=VOCABULARY, num_key_value_heads=2, num_local_experts=4, use_cache=False
    )
    return transformers.MixtralForCausalLM(config), tokens(6, 256)


def mamba() -> Made:
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=192, state_size=8, num_hidden_layers=3, use_cache=False
    )
    return transformers.MambaForCausalLM(config), tokens(8, 64)


def whisper() -> Made:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=40,
        d_model=256,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        max_source_positions=200,
        max_target_positions=200,
        dropout=0.1,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    batch = {"input_features": wave(6, 40, 400), "labels": tokens(6, 192)["labels"]}
    return transformers.WhisperForConditionalGeneration(config), batch


def clip() -> Made:
    config = transformers.CLIPConfig(
        text_config={
            **WIDE,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
            "bos_token_id": 0,
            "eos_token_id": VOCABULARY - 1,
        },
        vision_config={**WIDE, "image_size": 96, "patch_size": 8},
        projection_dim=64,
    )
    batch = {"input_ids": tokens(8, 64)["input_ids"], "pixel_values": wave(8, 3, 96, 96), "return_loss": True}
    return transformers.CLIPModel(config), batch


def resnet() -> Made:
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[128, 256, 512, 1024], depths=[3, 4, 6, 3], layer_type="bottleneck"
    )
    return transformers.ResNetForImageClassification(config), images(12, 128)


def unet() -> Made:
    target = torch.arange(8 * 128 * 128).remainder(3).reshape(8, 128, 128)
    return zoo().WithLoss(zoo().UNet(width=32)), {"x": wave(8, 3, 128, 128), "target": target}


def lstm() -> Made:
    target = torch.arange(48 * 96).remainder(3).reshape(48, 96)
    return zoo().WithLoss(zoo().Recurrent(width=448)), {"x": wave(48, 96, 448), "target": target}


def densenet() -> Made:
    model = zoo().WithLoss(zoo().DenseNet(layers=16, growth=12))
    return model, {"x": wave(6, 3, 56, 56), "target": torch.arange(6).remainder(4)}


def experts() -> Made:
    model = zoo().WithLoss(zoo().Routed(experts=4, width=384))
    return model, {"x": wave(8192, 384), "target": torch.arange(8192).remainder(384)}


MODELS: dict[str, Callable[[], Made]] = {
    "GPT-2": gpt2,
    "Llama": llama,
    "BERT": bert,
    "T5": t5,
    "ViT": vit,
    "Mixtral": mixtral,
    "Mamba": mamba,
    "Whisper": whisper,
    "CLIP": clip,
    "ResNet": resnet,
    "U-Net": unet,
    "LSTM": lstm,
    "DenseNet": densenet,
    "mixture of experts": experts,
}
"""By the names that tests/zoo.py has for them."""


def made(name: str) -> Made:
    """A model of `MODELS`, the same at every call, and its batch."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return model.train(), batch
