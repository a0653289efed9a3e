"""The manifest notices every changed byte, and other formats."""

import hashlib
import json
from pathlib import Path

import pytest

from kway.checkpoints.durable import Sum
from kway.checkpoints.manifest import Manifest, check_part
from kway.errors import UsageError

SOURCE = Path("step-3/manifest.json")
GOOD = Manifest(
    3, 1, {"positions": {"epoch": 1, "lr": 0.1}}, {"b": "a"}, {"weights.safetensors": Sum(9, "ab")}
)


def resigned(**changes):
    """The manifest with other fields, as somebody who knows how it is hashed would write it."""
    body = json.loads(GOOD.to_bytes())
    del body["sha256"]
    body |= changes
    body = {key: value for key, value in body.items() if value is not None}

    def text(value):
        return json.dumps(value, indent=1).encode() + b"\n"

    return text({**body, "sha256": hashlib.sha256(text(body)).hexdigest()})


def test_it_comes_back_equal():
    assert Manifest.from_bytes(GOOD.to_bytes(), SOURCE) == GOOD
    assert Manifest.from_bytes(resigned(), SOURCE) == GOOD


def test_every_flipped_byte_is_noticed():
    content = GOOD.to_bytes()
    for place in range(len(content)):
        for bit in (0, 4, 7):
            broken = bytearray(content)
            broken[place] ^= 1 << bit
            with pytest.raises(UsageError, match=r"step-3/manifest\.json"):
                Manifest.from_bytes(bytes(broken), SOURCE)


def test_every_truncation_is_noticed():
    content = GOOD.to_bytes()
    for length in range(len(content)):
        with pytest.raises(UsageError, match=r"manifest\.json"):
            Manifest.from_bytes(content[:length], SOURCE)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "not the manifest of a checkpoint"),
        (b"{}", "not the manifest of a checkpoint"),
        (resigned(format=2), "has format 2: this version of kway reads 1"),
        (resigned(format=None), "has format None"),
        (resigned(files=None), "lacks what a manifest needs"),
        (resigned(step="x"), "lacks what a manifest needs"),
        *((resigned(step=step), "lacks what a manifest needs .step") for step in (-1, 1.5, "3", True)),
        (resigned(epoch=-1), "lacks what a manifest needs .epoch -1, which counts from 0"),
        (resigned(ties=["b"]), "lacks what a manifest needs"),
        (resigned(files={}), r"names no weights\.safetensors: every checkpoint has weights"),
        (resigned(files={"../../etc/x.safetensors": {"size": 1, "sha256": "a"}}), "names files outside"),
        (resigned(files={"x.pkl": {"size": 1, "sha256": "a"}}), "names files outside"),
    ],
)
def test_another_content_says_why(content, reason):
    with pytest.raises(UsageError, match=reason):
        Manifest.from_bytes(content, SOURCE)


@pytest.mark.parametrize("name", ["weights", "", "A", "../x", "a/b", "x.y", 3, "a" * 65])
def test_names_of_parts(name):
    with pytest.raises(UsageError, match="of a checkpoint"):
        check_part(name)
    check_part("batch-norm_2")
