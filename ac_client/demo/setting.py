"""Build the models that the demo trains, with random weights, and their batches from a seed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class DecoderSetting:
    """Size of a GPT-2 and its batch.

    With the default, a step takes a tenth of a second, most of it in kernels. A minute has many steps.
    """

    layers: int = 3
    width: int = 384
    heads: int = 6
    vocabulary: int = 512
    batch: int = 1
    tokens: int = 256
    seed: int = 0
    keep_gradients: bool = True  # between steps, zeroed; else they are freed

    def describe(self) -> str:
        """Describe the setting in one line."""
        size = f"{self.layers} layers of width {self.width}, dropout 0.1, vocabulary {self.vocabulary}"
        return f"GPT-2, {size}, batch {self.batch} x {self.tokens} tokens, SGD"

    def build(self) -> nn.Module:
        """Build the model; the same setting gives the same weights."""
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(self.seed)
        config = transformers.GPT2Config(
            n_layer=self.layers,
            n_embd=self.width,
            n_head=self.heads,
            n_positions=self.tokens,
            vocab_size=self.vocabulary,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
        return model.train()

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the transformer blocks: `transformer.h.0`, `transformer.h.1`, ..."""
        return model.get_submodule("transformer.h").children()

    def inputs(self) -> dict[str, Tensor]:
        """Return token ids, the same for every row and step."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(self.vocabulary, (self.batch, self.tokens), generator=generator)
        return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True, slots=True)
class UNetSetting:
    """Size of a U-Net and its images."""

    channels: int = 32
    batch: int = 1
    pixels: int = 96
    seed: int = 0
    keep_gradients: bool = True

    def describe(self) -> str:
        """Describe the setting in one line."""
        size = f"{self.batch} x {self.pixels} x {self.pixels}"
        return f"U-Net, 3 levels from {self.channels} channels, batch {size} pixels, SGD"

    def build(self) -> nn.Module:
        """Build the model; the same setting gives the same weights."""
        torch.manual_seed(self.seed)
        return UNet([self.channels << level for level in range(3)])

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the pairs of convolutions."""
        return model.get_submodule("blocks").children()

    def inputs(self) -> dict[str, Tensor]:
        """Return images and a class for each pixel, the same for every row and step."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        images = torch.randn(self.batch, 3, self.pixels, self.pixels, generator=generator)
        return {"images": images, "labels": (images[:, 0] > 0).long()}


class UNet(nn.Module):
    """Pairs of convolutions down and up again, with a skip connection on each level."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        up = widths[-2::-1]
        pairs = [*zip([3, *widths], widths, strict=False), *((2 * width, width) for width in up)]
        self.blocks = nn.ModuleList(nn.Sequential(*_convolution(a, b), *_convolution(b, b)) for a, b in pairs)
        self.rises = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in up)
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        down = len(self.rises) + 1
        x, skips = self.blocks[0](images), list[Tensor]()
        for block in self.blocks[1:down]:
            skips.append(x)
            x = block(F.max_pool2d(x, 2))
        for rise, block in zip(self.rises, self.blocks[down:], strict=True):
            x = block(torch.cat([rise(x), skips.pop()], 1))
        return F.cross_entropy(self.head(x), labels)


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)


Setting = DecoderSetting | UNetSetting

TINY = DecoderSetting(layers=2, width=32, heads=2, vocabulary=64, batch=2, tokens=16)
"""For tests: the same code in a second."""
