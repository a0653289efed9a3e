"""ResNet-18 for small images: a 3x3 stem without pooling."""

import torch
from torch import nn

from kway.zoo import Shape, check

_STAGES = (64, 128, 256, 512)


class Block(nn.Module):
    """Two convolutions and a shortcut: (N, inputs, H, W) to (N, outputs, H / stride, W / stride), rounded up."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut: nn.Module = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride)
        self.activation = nn.ReLU()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the activations of the block."""
        inner = self.activation(self.norm1(self.conv1(features)))
        inner = self.norm2(self.conv2(inner))
        return self.activation(inner + self.shortcut(features))  # type: ignore[no-any-return]


class ResNet18(nn.Module):
    """Takes images, shape (N, C, H, W), and returns scores, shape (N, classes)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, _STAGES[0], 3, padding=1), nn.BatchNorm2d(_STAGES[0]), nn.ReLU()
        )
        stages, inputs = [], _STAGES[0]
        for number, outputs in enumerate(_STAGES):
            stages.append(
                nn.Sequential(Block(inputs, outputs, 2 if number else 1), Block(outputs, outputs, 1))
            )
            inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.output = nn.Linear(inputs, classes)
        self.apply(_initialise)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores of each class."""
        # A mean over the pixels: the gradient of adaptive pooling has no deterministic kernel on CUDA.
        return self.output(self.stages(self.stem(images)).mean((2, 3)))  # type: ignore[no-any-return]


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.normal_(module.weight, 0, 0.01)


def build(shape: Shape, classes: int) -> nn.Module:
    """Make a ResNet-18 with 11.2 million parameters; images of any size."""
    check("resnet18", shape, classes)
    return ResNet18(shape[0], classes)
