import gzip
import hashlib

import numpy as np
import pytest

from kway.data.idx import load_folder, read
from kway.errors import DataError

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def idx(array, magic=None):
    sizes = np.array(array.shape, ">u4").tobytes()
    return (magic or bytes([0, 0, 8, array.ndim])) + sizes + array.astype(np.uint8).tobytes()


@pytest.fixture
def root(tmp_path):
    """A whole data set of 12 and 4 images of 5 x 6 pixels, half of the files packed."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for part, count in ((0, 12), (2, 4)):
        images = draw.integers(0, 256, (count, 5, 6))
        (folder / f"{NAMES[part]}.gz").write_bytes(gzip.compress(idx(images)))
        (folder / NAMES[part + 1]).write_bytes(idx(np.arange(count) % 10))
    return tmp_path


def load(root, checksums=None):
    return load_folder("tiny", root, checksums or {})


def test_four_files_make_a_source(root):
    source = load(root)
    assert (len(source.train), len(source.validation)) == (12, 4)
    assert (source.shape, source.classes) == ((1, 5, 6), 10)
    first = np.random.default_rng(0).integers(0, 256, (12, 5, 6))[3]
    pixels, label = source.train[3]
    assert np.array_equal((pixels[0] * 255).round().numpy(), first)
    assert label == 3


def damage(root, number, content, packed):
    path = root / "tiny" / (NAMES[number] + (".gz" if packed else ""))
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("cut", [30, 100, -1])
def test_a_truncated_gzip_file_is_named(root, cut):
    path = root / "tiny" / f"{NAMES[0]}.gz"
    damage(root, 0, path.read_bytes()[:cut], True)
    with pytest.raises(DataError, match=rf"{path.name} cannot be read"):
        load(root)


PIXELS = idx(np.zeros((12, 5, 6)))


@pytest.mark.parametrize(
    ("number", "content", "text"),
    [
        (0, b"", "starts with nothing"),
        (0, PIXELS[:9], "9 bytes: a header of 16"),
        (0, PIXELS[:-7], r"369 bytes: 376, for the shape \(12, 5, 6\)"),
        (0, PIXELS + b"x", "377 bytes: 376"),
        (0, idx(np.zeros((12, 5, 6)), magic=b"\0\0\x0d\3"), "starts with 00000d03: 00000803"),
        (0, idx(np.zeros(12)), "starts with 00000801"),
        (0, idx(np.zeros((12, 5, 7))), "one shape"),
        (0, b"\0\0\x08\3" + b"\xff" * 12, "16 bytes: 79228162458924105385300197391"),
        (1, idx(np.zeros(11)), "11 labels: 12"),
        (1, idx(np.full(12, 10)), "labels from 10 to 10: labels from 0 to 9"),
    ],
)
def test_wrong_content_is_named(root, number, content, text):
    packed = number == 0
    damage(root, number, gzip.compress(content) if packed else content, packed)
    with pytest.raises(DataError, match=text) as caught:
        load(root)
    assert NAMES[number] in str(caught.value) or "one shape" in text


@pytest.mark.parametrize(
    ("number", "content", "packed", "text"),
    [
        (0, b"", True, "is empty"),
        (1, b"", False, "is empty"),
        (2, gzip.compress(idx(np.zeros((0, 5, 6))), mtime=0), True, "holds no images"),
        (3, idx(np.zeros(0)), False, "holds no images"),
    ],
)
def test_an_empty_file_is_named_and_how_to_get_it(root, number, content, packed, text):
    path = damage(root, number, content, packed)
    with pytest.raises(DataError) as caught:
        load(root)
    assert str(caught.value) == (
        f"{path} {text}: a whole file of tiny; remove {root / 'tiny'} and call kway data fetch tiny, "
        "or put the file there"
    )


def test_a_file_that_is_no_gzip_is_named(root):
    damage(root, 0, b"<html>not found</html>", True)
    with pytest.raises(DataError, match=r"ubyte\.gz cannot be read: Not a gzipped file"):
        load(root)


@pytest.mark.parametrize("number", range(4))
def test_a_missing_file_is_named(root, number):
    for path in (root / "tiny").glob(f"{NAMES[number]}*"):
        path.unlink()
    with pytest.raises(DataError, match=rf"no file .*{NAMES[number]}"):
        load(root)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no folder .*tiny"):
        load(tmp_path)


def test_without_a_folder_the_error_says_how_to_name_one():
    with pytest.raises(DataError, match=r"--data-dir or set KWAY_DATA"):
        load(None)


def test_a_checksum_is_that_of_the_unpacked_content(root):
    path = root / "tiny" / f"{NAMES[0]}.gz"
    content = gzip.decompress(path.read_bytes())
    right = hashlib.sha256(content).hexdigest()
    assert len(load(root, {NAMES[0]: right}).train) == 12
    with pytest.raises(DataError, match=rf"{path.name} has content of SHA-256 {right}: 00"):
        load(root, {NAMES[0]: "00"})


def test_an_array_that_was_read_can_be_written_to(root):
    array = read(root / "tiny" / NAMES[1], 1)
    array[0] = 7
    assert array.tolist()[:3] == [7, 1, 2]
