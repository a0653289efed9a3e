import pickle
from functools import partial

import numpy as np
import pytest
import torch
from tests.data.small_cifar import STEMS, binary, drawn, pickled
from torch import nn

import kway
from kway.data.sources import load
from kway.errors import DataError
from kway.zoo import get

FORMS = {
    "binary": (binary, ""),
    "unpacked binary": (binary, "cifar-10-batches-bin"),
    "pickled": (pickled, ""),
    "unpacked pickled": (pickled, "cifar-10-batches-py"),
}


@pytest.mark.parametrize("form", FORMS)
def test_both_forms_hold_the_same_where_the_archive_puts_them_too(tmp_path, form):
    write, inside = FORMS[form]
    write(tmp_path / "cifar10" / inside)
    source = load("cifar10", tmp_path)
    assert (len(source.train), len(source.validation)) == (50, 20)
    assert (source.shape, source.classes, source.train.name) == ((3, 32, 32), 10, "cifar10")
    pixels, labels = source.train.take(np.arange(50))
    expected = [drawn(10, number) for number in range(5)]
    assert torch.equal(labels, torch.cat([torch.from_numpy(label) for _, label in expected]))
    # Planes of red, green and blue, each line by line.
    third = expected[2][0][4]
    assert torch.equal((pixels[24] * 255).round().to(torch.uint8), torch.from_numpy(third).view(3, 32, 32))
    held, _ = source.validation.take(np.arange(20))
    assert torch.equal((held * 255).round().to(torch.uint8).flatten(1), torch.from_numpy(drawn(20, 5)[0]))


def test_without_files_the_error_says_how_to_get_them(tmp_path):
    with pytest.raises(DataError, match=r"no folder .*cifar10.*kway data fetch cifar10 brings them"):
        load("cifar10", tmp_path)
    (tmp_path / "cifar10").mkdir()
    with pytest.raises(
        DataError, match=r"none of the files.*data_batch_1\.bin to data_batch_5\.bin.*kway data fetch"
    ):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("write", [binary, pickled])
@pytest.mark.parametrize("stem", [STEMS[0], STEMS[3], STEMS[5]])
def test_a_missing_file_is_named(tmp_path, write, stem):
    folder = write(tmp_path / "cifar10")
    for path in folder.glob(f"{stem}*"):
        path.unlink()
    with pytest.raises(DataError, match=rf"no file .*{stem}"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (bytes(3073 * 2 - 1), r"data_batch_2.bin holds 6145 bytes: rows of 3073"),
        (b"\x0a" + bytes(3072), "data_batch_2.bin: labels from 10 to 10"),
    ],
)
def test_a_wrong_binary_file_is_named(tmp_path, content, text):
    (binary(tmp_path / "cifar10") / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(DataError, match=text):
        load("cifar10", tmp_path)


NONE = pickle.dumps({b"labels": [], b"data": np.zeros((0, 3072), np.uint8)}, 4)


@pytest.mark.parametrize(
    ("form", "content", "text"),
    [
        ("binary", b"", "is empty"),
        ("unpacked binary", b"", "is empty"),
        ("pickled", b"", "is empty"),
        ("unpacked pickled", NONE, "holds no images"),
    ],
)
@pytest.mark.parametrize("stem", [STEMS[1], STEMS[5]])
def test_an_empty_file_is_named_and_how_to_get_it(tmp_path, form, content, text, stem):
    write, inside = FORMS[form]
    (path,) = write(tmp_path / "cifar10" / inside).glob(f"{stem}*")
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load("cifar10", tmp_path)
    assert str(caught.value) == (
        f"{path} {text}: a whole file of cifar10; remove {tmp_path / 'cifar10'} and call kway data fetch cifar10, "
        "or put the file there"
    )


PIXELS = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ([1], "has no 'data'"),
        ({"data": PIXELS}, "has no 'labels'"),
        ({"data": [0] * 3072, "labels": [1]}, "an array 'data' that is none"),
        ({"data": PIXELS.astype(np.int64), "labels": [1, 2]}, r"int64, shape \(2, 3072\): uint8"),
        ({"data": PIXELS[:, :3000], "labels": [1, 2]}, r"shape \(2, 3000\)"),
        ({"data": PIXELS, "labels": [1]}, "1 labels: 2"),
        ({"data": PIXELS, "labels": [1, 10]}, "labels from 1 to 10"),
        ({"data": PIXELS, "labels": [1, 2**80]}, "labels from 1 to"),
        ({"data": PIXELS, "labels": ["cat", "dog"]}, "a list of whole numbers"),
        ({"data": PIXELS, "labels": PIXELS[:, 0]}, "'labels' is of type Held"),
        ({"data": np.float32, "labels": [1, 2]}, "names numpy.float32"),
    ],
)
def test_a_wrong_pickle_is_named(tmp_path, held, text):
    (pickled(tmp_path / "cifar10") / "data_batch_2").write_bytes(pickle.dumps(held, 2))
    with pytest.raises(DataError, match=rf"data_batch_2.*{text}"):
        load("cifar10", tmp_path)


def test_resnet18_learns_generated_files_on_two_ranks(tmp_path, ranks):
    binary(tmp_path / "cifar10", (4, 4, 4, 2, 2, 8))
    source = load("cifar10", tmp_path)
    job = kway.Job(
        model=partial(get("resnet18"), source.shape, source.classes),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05),
        data=source.train,
        validation=source.validation,
        batch_size=8,
        metrics={"accuracy": kway.accuracy},
    )
    run = kway.train(job, devices="cpu:2", epochs=2, step_kind="eager", tune=False, ranks=ranks.of(2))
    assert run.record.job["data"] == "cifar10"
    assert (run.record.devices, run.record.steps) == (2, 4)
    first, last = run.epochs
    assert last["train_loss"] < first["train_loss"]
