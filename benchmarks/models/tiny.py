"""Architectures that people train, small enough for tests, each with a batch. Each model returns its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.models import batches
from benchmarks.models.batches import Batch
from benchmarks.models.gpt2 import gpt2
from benchmarks.models.modules import (
    Bags,
    CellLoop,
    DenseNet,
    Experts,
    MessagePassing,
    Recognizer,
    Recurrent,
    Routed,
    UNet,
    WithLoss,
)


@dataclass(frozen=True, slots=True)
class ZooModel:
    """A model of the zoo: its name, and functions that build it and the batch of one training step."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]


def text() -> Batch:
    return batches.tokens(2, 24, 37)


def wave(*shape: int) -> Tensor:
    """Return numbers in [-1, 1] that require a gradient, in a leaf that is a view."""
    return batches.wave(*shape).requires_grad_()


def images() -> Batch:
    batch = batches.images(8, 32)
    batch["pixel_values"].requires_grad_()
    return batch


SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

# A peak must be saved tensors, not the workspace of a convolution, which depends on the CPU's kernels, and
# mostly on the size of the image. So images have many patches, and the ResNet is widest at its first stage.
ZOO = (
    ZooModel(
        "GPT-2",
        lambda: gpt2(layers=2, width=32, heads=4, vocabulary=64, positions=32),
        text,
    ),
    ZooModel(
        "Llama",
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SMALL, vocab_size=64, num_key_value_heads=2, use_cache=False)
        ),
        text,
    ),
    ZooModel(
        "BERT",
        lambda: transformers.BertForSequenceClassification(
            transformers.BertConfig(**SMALL, vocab_size=64, max_position_embeddings=32)
        ),
        lambda: {
            "input_ids": text()["input_ids"],
            "attention_mask": (torch.arange(24) < torch.tensor([[24], [17]])).long(),
            "labels": torch.tensor([0, 1]),
        },
    ),
    ZooModel(
        "T5",
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=64,
                d_model=32,
                d_ff=64,
                d_kv=8,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
                use_cache=False,
            )
        ),
        text,
    ),
    ZooModel(
        "ViT",
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(**SMALL, image_size=32, patch_size=4, hidden_dropout_prob=0.1)
        ),
        images,
    ),
    ZooModel(
        "Mixtral",
        lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                **SMALL, vocab_size=64, num_key_value_heads=2, num_local_experts=4, use_cache=False
            )
        ),
        text,
    ),
    ZooModel(
        "Mamba",
        lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(
                vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2, use_cache=False
            )
        ),
        lambda: {name: ids[:, :8] for name, ids in text().items()},
    ),
    ZooModel(
        "Whisper",
        lambda: transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(
                vocab_size=64,
                num_mel_bins=8,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                max_source_positions=16,
                max_target_positions=32,
                dropout=0.1,
                use_cache=False,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
            )
        ),
        lambda: {"input_features": wave(2, 8, 32), "labels": text()["labels"]},
    ),
    ZooModel(
        "CLIP",
        lambda: transformers.CLIPModel(
            transformers.CLIPConfig(
                text_config={
                    **SMALL,
                    "vocab_size": 64,
                    "max_position_embeddings": 32,
                    "bos_token_id": 0,
                    "eos_token_id": 36,
                },
                vision_config={**SMALL, "image_size": 32, "patch_size": 4},
                projection_dim=16,
            )
        ),
        lambda: {
            "input_ids": text()["input_ids"].repeat(4, 1),
            "pixel_values": images()["pixel_values"],
            "return_loss": True,
        },
    ),
    ZooModel(
        "ResNet",
        lambda: transformers.ResNetForImageClassification(
            transformers.ResNetConfig(
                embedding_size=16, hidden_sizes=[48, 16, 16, 16], depths=[2, 1, 1, 1], layer_type="basic"
            )
        ),
        images,
    ),
    ZooModel(
        "U-Net",
        lambda: WithLoss(UNet()),
        lambda: {"x": wave(2, 3, 16, 16), "target": torch.arange(512).remainder(3).reshape(2, 16, 16)},
    ),
    ZooModel(
        "LSTM",
        lambda: WithLoss(Recurrent()),
        lambda: {"x": wave(8, 12, 8), "target": torch.arange(96).remainder(3).reshape(8, 12)},
    ),
    ZooModel(
        "DenseNet",
        lambda: WithLoss(DenseNet()),
        lambda: {"x": wave(4, 3, 12, 12), "target": torch.arange(4)},
    ),
    ZooModel(
        "mixture of experts",
        lambda: WithLoss(Routed()),
        lambda: {"x": wave(96, 16), "target": torch.arange(96).remainder(16)},
    ),
)


IRREGULAR = (
    ZooModel(
        "message passing",
        MessagePassing,
        lambda: {
            "x": wave(40, 16),
            "source": (torch.arange(600) * 7).remainder(40),
            "target": (torch.arange(600) * 11 + 3).remainder(40),
        },
    ),
    ZooModel("grouped experts", Experts, lambda: {"x": wave(256, 16)}),
    ZooModel("LSTM cells", CellLoop, lambda: {"x": wave(64, 5, 16)}),
    ZooModel(
        "packed LSTM",
        Recognizer,
        lambda: {
            "x": wave(12, 6, 16),
            "lengths": 6 - torch.arange(12) // 6,
            "labels": 1 + torch.arange(24).remainder(5).reshape(12, 2),
        },
    ),
    ZooModel(
        "sparse embeddings",
        Bags,
        lambda: {
            "items": (torch.arange(1280) * 13).remainder(200),
            "starts": torch.arange(0, 1280, 5),
            "users": torch.arange(256).remainder(50),
        },
    ),
)
"""Models whose ops, or the sizes of their tensors, depend on the batch. Their layers are `blocks`."""
