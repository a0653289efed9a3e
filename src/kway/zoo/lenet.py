"""LeNet with ReLU and average pooling."""

import torch
from torch import nn

from kway.errors import UsageError
from kway.zoo import Shape, check


class LeNet(nn.Module):
    """Takes images, shape (N, C, H, W), and returns scores, shape (N, classes)."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        rows, columns = (((side - 2) // 2 - 4) // 2 for side in (height, width))
        if min(rows, columns) < 1:
            raise UsageError(f"lenet for images of {height} x {width}", "at least 14 x 14 pixels")
        self.conv1 = nn.Conv2d(channels, 20, 3)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.hidden = nn.Linear(50 * rows * columns, 128)
        self.output = nn.Linear(128, classes)
        self.activation, self.pool, self.flatten = nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()
        self.apply(_initialise)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores of each class."""
        features = self.pool(self.activation(self.conv1(images)))
        features = self.pool(self.activation(self.conv2(features)))
        return self.output(self.activation(self.hidden(self.flatten(features))))  # type: ignore[no-any-return]


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.normal_(module.weight, 0, 0.01)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def build(shape: Shape, classes: int) -> nn.Module:
    """Make a LeNet. Raises ``UsageError`` for images below 14 x 14 pixels."""
    check("lenet", shape, classes)
    return LeNet(shape, classes)
