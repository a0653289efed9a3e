import collections
import os
import pickle
import struct

import numpy as np
import pytest

from kway.data.plain_pickle import Held, read
from kway.errors import DataError


def written(tmp_path, content):
    path = tmp_path / "batch"
    path.write_bytes(content)
    return path


def back(tmp_path, value, protocol):
    return read(written(tmp_path, pickle.dumps(value, protocol)))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.uint8).reshape(3, 4),
        np.asfortranarray(np.arange(12, dtype=np.int64).reshape(3, 4)),
        np.arange(3, dtype=">f4"),
        np.array([True, False]),
    ],
    ids=["bytes", "fortran", "big-endian", "booleans"],
)
def test_arrays_of_numbers_come_back(tmp_path, protocol, array):
    found = back(tmp_path, {"data": array, "labels": [1, 2]}, protocol)
    held = found["data"] if "data" in found else found[b"data"]
    assert isinstance(held, Held)
    assert np.array_equal(held.array, array)
    assert held.array.dtype == array.dtype.newbyteorder("=")
    held.array[0] = 0  # no view of what was read


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_comes_back(tmp_path, protocol):
    plain = {"a": [1, -(2**70), 2.5, None, True], "b": ("x", b"\x00\xff"), "c": {"d": []}}
    assert back(tmp_path, plain, protocol) == plain


def test_what_python_2_wrote_is_read(tmp_path):
    """By hand, as Python 2 with numpy 1 writes it at protocol 2: its texts are bytes of Latin-1."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
        b"(K\x01K\x02K\x03\x86cnumpy\ndtype\n"
        + text(b"u1")
        + b"K\x00K\x01\x87R(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + text(b"\x00\x01\x02\x80\xfe\xff")
        + b"tb"
    )
    found = read(
        written(tmp_path, b"\x80\x02}(" + text(b"data") + array + text(b"labels") + b"](K\x03K\x04eu.")
    )
    assert found[b"data"].array.tolist() == [[0, 1, 2], [128, 254, 255]]
    assert found[b"labels"] == [3, 4]


class Calls:
    def __reduce__(self):
        return os.system, ("touch was-run",)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (Calls(), r"(posix|nt)\.system"),
        (collections.OrderedDict(a=1), r"collections\.OrderedDict"),
        (print, r"(builtins|__builtin__)\.print"),
        ({1, 2}, r"(builtins|__builtin__)\.set"),
        (np.float64(3), r"numpy.*scalar"),
        (np.random.default_rng(0), r"numpy\.random"),
    ],
    ids=["call", "class", "function", "set", "scalar", "generator"],
)
def test_whatever_else_a_pickle_names_is_refused(tmp_path, monkeypatch, value, names):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"batch names {names}.*do not load it"):
        back(tmp_path, [value], 2)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    "array",
    [
        np.array([{}, []], dtype=object),
        np.array(["a"]),
        np.zeros(2, "i4,f8"),
        np.zeros(2, "M8[s]"),
        np.zeros(2, "c16"),
    ],
    ids=["objects", "text", "structure", "dates", "complex"],
)
@pytest.mark.parametrize("protocol", [2, 5])
def test_arrays_of_anything_but_numbers_are_refused(tmp_path, array, protocol):
    with pytest.raises(DataError, match=r"batch (holds|names)"):
        back(tmp_path, array, protocol)


RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n)R"
U1 = b"cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        # An array larger than its bytes: numpy would be asked to read beyond them.
        (
            RECONSTRUCT + b"(K\x01K\x08\x85" + U1 + b"\x89C\x04abcdtb.",
            "4 bytes for an array of uint8 and shape",
        ),
        (RECONSTRUCT + b"(K\x01J\xff\xff\xff\xff\x85" + U1 + b"\x89C\x00tb.", r"shape \(-1,\)"),
        (RECONSTRUCT + b"(K\x01X\x01\x00\x00\x00a\x85" + U1 + b"\x89C\x00tb.", "array of shape"),
        (RECONSTRUCT + b"K\x01b.", "not made of numbers"),
        # State for a stand-in, and a call of what is none.
        (b"cnumpy\nndarray\n}(X\x01\x00\x00\x00aK\x01ub.", "gives state to what has none"),
        (b"cnumpy.core.multiarray\n_reconstruct\n}(X\x01\x00\x00\x00aK\x01ub.", "gives state"),
        (b"cnumpy\nndarray\n)R.", "no pickle that can be read"),
        (b"cnumpy\nndarray\n)\x81.", "no pickle that can be read"),
        (b"X\x01\x00\x00\x00aX\x01\x00\x00\x00b\x93.", "names a.b"),
        (b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86R.", "encodes what are no bytes"),
        (b"K\x01Q.", "refers to what is not in it"),
        (b"\x82\x01.", "no pickle that can be read"),
        (b"", "no pickle that can be read"),
        (b"<html>", "no pickle that can be read"),
        (b"X" + struct.pack("<I", 2**31) + b"a.", "no pickle that can be read"),
    ],
)
def test_crafted_and_damaged_pickles_are_refused(tmp_path, content, text):
    with pytest.raises(DataError, match=text):
        read(written(tmp_path, b"\x80\x02" + content))


def test_every_cut_of_a_pickle_is_told(tmp_path):
    whole = pickle.dumps({"data": np.arange(6, dtype=np.uint8).reshape(2, 3), "labels": [1, 2]}, 2)
    for end in range(len(whole)):
        with pytest.raises(DataError):
            read(written(tmp_path, whole[:end]))
