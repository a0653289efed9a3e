"""Fashion-MNIST: 60,000 and 10,000 images of clothes, 28 x 28, one channel, 10 classes."""

from pathlib import Path

from kway.data.idx import load_folder
from kway.data.sources import Source

_SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


def load(data_dir: Path | None, seed: int) -> Source:
    """Read the four IDX files in ``data_dir``/fashion-mnist. Raises ``DataError`` for any other content."""
    return load_folder("fashion-mnist", data_dir, _SHA256)
