"""FCN on a dilated ResNet with a deep stem, as mmsegmentation trains it on Cityscapes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 19
BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """Return a convolution, its batch norm and a ReLU in place."""
    padding = dilation * (size // 2)
    layer = nn.Conv2d(inputs, outputs, size, stride, padding, dilation, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """A basic block or a bottleneck."""

    def __init__(self, inputs: int, width: int, stride: int, dilation: int, *, narrow: bool) -> None:
        super().__init__()
        outputs = 4 * width if narrow else width
        if narrow:
            parts = [conv(inputs, width, 1), conv(width, width, 3, stride, dilation), conv(width, outputs, 1)]
        else:
            parts = [conv(inputs, width, 3, stride, dilation), conv(width, width)]
        self.body = nn.Sequential(*parts[:-1], parts[-1][:2])
        self.shortcut = conv(inputs, outputs, 1, stride)[:2] if stride > 1 or inputs != outputs else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.shortcut is None else self.shortcut(x)
        out = self.body(x)
        out += identity
        return self.relu(out)


class Fcn(nn.Module):
    """The backbone, a head on its last stage, an auxiliary one on the stage before, and both losses."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        narrow = depth >= 50
        last = 2048 if narrow else 512
        self.stem = nn.Sequential(conv(3, 32, 3, 2), conv(32, 32), conv(32, 64), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.ModuleList(nn.Sequential(*stage) for stage in self._stages(depth, narrow=narrow))
        width = last // 4
        self.convs = nn.Sequential(conv(last, width), conv(width, width))
        self.cat = nn.Sequential(conv(last + width, width), nn.Dropout2d(0.1), nn.Conv2d(width, CLASSES, 1))
        half = last // 8
        self.auxiliary = nn.Sequential(conv(last // 2, half), nn.Dropout2d(0.1), nn.Conv2d(half, CLASSES, 1))

    @staticmethod
    def _stages(depth: int, *, narrow: bool) -> Iterator[list[nn.Module]]:
        inputs = 64
        sizes = zip((64, 128, 256, 512), BLOCKS[depth], (1, 2, 1, 1), (1, 1, 2, 4), strict=True)
        for width, count, stride, dilation in sizes:
            stage: list[nn.Module] = []
            for i in range(count):
                first = max(1, dilation // 2)
                stage.append(
                    Residual(inputs, width, 1 if i else stride, dilation if i else first, narrow=narrow)
                )
                inputs = 4 * width if narrow else width
            yield stage

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        outputs = []
        x = self.stem(image)
        for stage in self.stages:
            x = stage(x)
            outputs.append(x)
        logits = self.cat(torch.cat([x, self.convs(x)], 1))
        return _loss(logits, target) + 0.4 * _loss(self.auxiliary(outputs[2]), target)


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    wide = F.interpolate(logits, size=target.shape[1:], mode="bilinear", align_corners=False)
    return F.cross_entropy(wide, target, ignore_index=255, reduction="none").mean()
