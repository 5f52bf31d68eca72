"""The zoo's architectures at a size whose step takes about a second on one core of a CPU.

Vocabularies and numbers of classes are small, so that a step's outputs are a small part of its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks.models import batches
from benchmarks.models.batches import Batch, ModelAndBatch, images, wave
from benchmarks.models.gpt2 import gpt2
from benchmarks.models.modules import DenseNet, Recurrent, Routed, UNet, WithLoss

VOCABULARY = 256

WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
}


def tokens(batch: int, length: int) -> Batch:
    return batches.tokens(batch, length, VOCABULARY - 3)


def llama() -> ModelAndBatch:
    config = transformers.LlamaConfig(**WIDE, vocab_size=VOCABULARY, num_key_value_heads=2, use_cache=False)
    return transformers.LlamaForCausalLM(config), tokens(6, 256)


def bert() -> ModelAndBatch:
    config = transformers.BertConfig(**WIDE, vocab_size=VOCABULARY, max_position_embeddings=256)
    ids = tokens(8, 256)["input_ids"]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(8).remainder(2)}
    batch["attention_mask"][1::2, 200:] = 0
    return transformers.BertForSequenceClassification(config), batch


def t5() -> ModelAndBatch:
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


def vit() -> ModelAndBatch:
    config = transformers.ViTConfig(**WIDE, image_size=96, patch_size=8, hidden_dropout_prob=0.1)
    return transformers.ViTForImageClassification(config), images(12, 96)


def mixtral() -> ModelAndBatch:
    wide = WIDE | {"intermediate_size": 512, "num_hidden_layers": 4}
    config = transformers.MixtralConfig(
        **wide, vocab_size=VOCABULARY, num_key_value_heads=2, num_local_experts=4, use_cache=False
    )
    return transformers.MixtralForCausalLM(config), tokens(6, 256)


def mamba() -> ModelAndBatch:
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=192, state_size=8, num_hidden_layers=3, use_cache=False
    )
    return transformers.MambaForCausalLM(config), tokens(8, 64)


def whisper() -> ModelAndBatch:
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


def clip() -> ModelAndBatch:
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


def resnet() -> ModelAndBatch:
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[128, 256, 512, 1024], depths=[3, 4, 6, 3], layer_type="bottleneck"
    )
    return transformers.ResNetForImageClassification(config), images(12, 128)


def unet() -> ModelAndBatch:
    target = torch.arange(8 * 128 * 128).remainder(3).reshape(8, 128, 128)
    return WithLoss(UNet(width=32)), {"x": wave(8, 3, 128, 128), "target": target}


def lstm() -> ModelAndBatch:
    target = torch.arange(48 * 96).remainder(3).reshape(48, 96)
    return WithLoss(Recurrent(width=448)), {"x": wave(48, 96, 448), "target": target}


def densenet() -> ModelAndBatch:
    model = WithLoss(DenseNet(layers=16, growth=12))
    return model, {"x": wave(6, 3, 56, 56), "target": torch.arange(6).remainder(4)}


def experts() -> ModelAndBatch:
    model = WithLoss(Routed(experts=4, width=384))
    return model, {"x": wave(8192, 384), "target": torch.arange(8192).remainder(384)}


MODELS: dict[str, Callable[[], ModelAndBatch]] = {
    "GPT-2": lambda: (
        gpt2(layers=6, width=256, heads=8, vocabulary=VOCABULARY, positions=256),
        tokens(8, 256),
    ),
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


def build(name: str) -> ModelAndBatch:
    """Return the model of `MODELS` in training mode, the same at every call, and its batch."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return model.train(), batch
