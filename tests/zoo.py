"""Architectures that people train, small, each with a batch. Their outputs have a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from models import Bags, CellLoop, Experts, MessagePassing, Recognizer, Recurrent, Routed
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Entry:
    """A model and the keyword arguments of one training step."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]


class WithLoss(nn.Module):
    """A model of one tensor, with a loss inside, where `apply` sees it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        out = self.model(x)
        loss = F.cross_entropy(out.flatten(0, -2), target.flatten())
        return {"loss": loss, "logits": out}


class DoubleConv(nn.Module):
    """Twice convolution, BatchNorm and in-place ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class UNet(nn.Module):
    """Long skips: what the way down makes is read on the way up, and a class for each pixel."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.down1, self.down2 = DoubleConv(3, width), DoubleConv(width, 2 * width)
        self.bottom = DoubleConv(2 * width, 4 * width)
        self.rise2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.rise1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up2, self.up1 = DoubleConv(4 * width, 2 * width), DoubleConv(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        y = self.up2(torch.cat([self.rise2(c), b], 1))
        y = self.up1(torch.cat([self.rise1(y), a], 1))
        return self.head(y).movedim(1, -1)


class DenseNet(nn.Module):
    """Every layer reads all layers before it."""

    def __init__(self, layers: int = 5, growth: int = 6, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, growth, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(growth * i),
                nn.ReLU(inplace=True),
                nn.Conv2d(growth * i, growth, 3, padding=1, bias=False),
                nn.Dropout2d(0.1),
            )
            for i in range(1, layers + 1)
        )
        self.head = nn.Linear(growth * (layers + 1), classes)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(torch.cat(features, 1).mean((2, 3)))


def text() -> dict[str, Any]:
    ids = torch.arange(48).remainder(37).reshape(2, 24)
    return {"input_ids": ids, "labels": ids}


def wave(*shape: int) -> Tensor:
    """Numbers in [-1, 1], in a leaf that is a view."""
    return torch.linspace(-9, 9, torch.Size(shape).numel()).sin().reshape(shape).requires_grad_()


def images() -> dict[str, Any]:
    return {"pixel_values": wave(8, 3, 32, 32), "labels": torch.arange(8).remainder(2)}


SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

ZOO = (
    Entry(
        "GPT-2",
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=64,
                n_positions=32,
                n_embd=32,
                n_layer=2,
                n_head=4,
                use_cache=False,
                bos_token_id=0,
                eos_token_id=0,
            )
        ),
        text,
    ),
    Entry(
        "Llama",
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SMALL, vocab_size=64, num_key_value_heads=2, use_cache=False)
        ),
        text,
    ),
    Entry(
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
    Entry(
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
    Entry(
        "ViT",
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(**SMALL, image_size=32, patch_size=8, hidden_dropout_prob=0.1)
        ),
        images,
    ),
    Entry(
        "Mixtral",
        lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                **SMALL, vocab_size=64, num_key_value_heads=2, num_local_experts=4, use_cache=False
            )
        ),
        text,
    ),
    Entry(
        "Mamba",
        lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(
                vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2, use_cache=False
            )
        ),
        lambda: {name: ids[:, :8] for name, ids in text().items()},
    ),
    Entry(
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
    Entry(
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
                vision_config={**SMALL, "image_size": 32, "patch_size": 8},
                projection_dim=16,
            )
        ),
        lambda: {
            "input_ids": text()["input_ids"].repeat(4, 1),
            "pixel_values": images()["pixel_values"],
            "return_loss": True,
        },
    ),
    Entry(
        "ResNet",
        lambda: transformers.ResNetForImageClassification(
            transformers.ResNetConfig(
                embedding_size=16, hidden_sizes=[16, 32, 32, 32], depths=[1, 1, 1, 1], layer_type="basic"
            )
        ),
        images,
    ),
    Entry(
        "U-Net",
        lambda: WithLoss(UNet()),
        lambda: {"x": wave(2, 3, 16, 16), "target": torch.arange(512).remainder(3).reshape(2, 16, 16)},
    ),
    Entry(
        "LSTM",
        lambda: WithLoss(Recurrent()),
        lambda: {"x": wave(8, 12, 8), "target": torch.arange(96).remainder(3).reshape(8, 12)},
    ),
    Entry(
        "DenseNet",
        lambda: WithLoss(DenseNet()),
        lambda: {"x": wave(4, 3, 12, 12), "target": torch.arange(4)},
    ),
    Entry(
        "mixture of experts",
        lambda: WithLoss(Routed()),
        lambda: {"x": wave(96, 16), "target": torch.arange(96).remainder(16)},
    ),
)


IRREGULAR = (
    Entry(
        "message passing",
        MessagePassing,
        lambda: {
            "x": wave(40, 16),
            "source": (torch.arange(600) * 7).remainder(40),
            "target": (torch.arange(600) * 11 + 3).remainder(40),
        },
    ),
    Entry("grouped experts", Experts, lambda: {"x": wave(256, 16)}),
    Entry("LSTM cells", CellLoop, lambda: {"x": wave(64, 5, 16)}),
    Entry(
        "packed LSTM",
        Recognizer,
        lambda: {
            "x": wave(12, 8, 16),
            "lengths": 8 - torch.arange(12) // 6,
            "labels": 1 + torch.arange(24).remainder(5).reshape(12, 2),
        },
    ),
    Entry(
        "sparse embeddings",
        Bags,
        lambda: {
            "items": (torch.arange(1280) * 13).remainder(200),
            "starts": torch.arange(0, 1280, 5),
            "users": torch.arange(256).remainder(50),
        },
    ),
)
"""Models whose ops, or their sizes, depend on the batch. Their layers are `blocks`."""
