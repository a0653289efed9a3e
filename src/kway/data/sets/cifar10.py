"""CIFAR-10: 50,000 and 10,000 images of animals and vehicles, 32 x 32, three channels, 10 classes."""

from pathlib import Path

from kway.data.originals import File, Original
from kway.data.sources import Source

_INSIDE = "cifar-10-batches-bin"
# The binary form: of the two that can be read, the one that needs no pickle.
ORIGINAL = Original(
    (
        File(
            "cifar-10-binary.tar.gz",
            170_052_171,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            (
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "https://cave.cs.toronto.edu/kriz/cifar-10-binary.tar.gz",
            ),
        ),
    ),
    "https://www.cs.toronto.edu/~kriz/cifar.html",
    (*(f"{_INSIDE}/data_batch_{number}.bin" for number in range(1, 6)), f"{_INSIDE}/test_batch.bin"),
)


def load(data_dir: Path | None, seed: int) -> Source:
    """Read the six files in ``data_dir``/cifar10, binary or pickled, with as many images as they hold."""
    from kway.data.cifar import load_folder

    return load_folder("cifar10", data_dir)
