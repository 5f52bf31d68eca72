"""DenseNet at its published sizes: every layer of a block reads all layers before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _normed(inputs: int, convolution: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), convolution)


class DenseNet(nn.Module):
    """The network of Huang et al., "Densely Connected Convolutional Networks", CVPR 2017, table 1.

    As in torchvision, each layer concatenates what it reads, and ReLU writes over the norm's output.
    """

    def __init__(self, depths: tuple[int, ...], growth: int, stem: int, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, stem, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(stem),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.blocks, self.transitions, width = nn.ModuleList(), nn.ModuleList(), stem
        for i, depth in enumerate(depths):
            if i:
                narrow = nn.Conv2d(width, width // 2, 1, bias=False)
                self.transitions.append(nn.Sequential(_normed(width, narrow), nn.AvgPool2d(2)))
                width //= 2
            widths = range(width, width + depth * growth, growth)
            self.blocks.append(nn.ModuleList(self._layer(inputs, growth) for inputs in widths))
            width += depth * growth
        self.norm, self.head = nn.BatchNorm2d(width), nn.Linear(width, classes)

    @staticmethod
    def _layer(inputs: int, growth: int) -> nn.Sequential:
        return nn.Sequential(
            _normed(inputs, nn.Conv2d(inputs, 4 * growth, 1, bias=False)),
            _normed(4 * growth, nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)),
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for i, block in enumerate(self.blocks):
            features = [self.transitions[i - 1](x) if i else x]
            assert isinstance(block, nn.ModuleList)
            for layer in block:
                features.append(layer(torch.cat(features, 1)))
            x = torch.cat(features, 1)
        x = F.relu(self.norm(x), inplace=True).mean((2, 3))
        return F.cross_entropy(self.head(x).float(), labels)
