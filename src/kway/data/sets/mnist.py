"""MNIST, or any set of its format: IDX files of images with labels 0 to 9."""

from pathlib import Path

from kway.data.originals import Original, gz_files
from kway.data.sources import Source

# The copies that torchvision and TensorFlow read: the page of the authors does not always answer.
ORIGINAL = Original(
    gz_files(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        {
            "train-images-idx3-ubyte": (
                9_912_422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            "train-labels-idx1-ubyte": (
                28_881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            "t10k-images-idx3-ubyte": (
                1_648_877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            "t10k-labels-idx1-ubyte": (
                4_542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        },
    ),
    "http://yann.lecun.com/exdb/mnist/",
)


def load(data_dir: Path | None, seed: int) -> Source:
    """Read the four IDX files in ``data_dir``/mnist, with as many images as they name."""
    from kway.data.idx import load_folder

    return load_folder("mnist", data_dir, {})
