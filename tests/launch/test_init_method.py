import os
import tracemalloc
from contextlib import nullcontext
from pathlib import Path

import pytest

from kway.errors import UsageError
from kway.launch.init_method import SIGN, InitMethod, check_file, chosen, parse


@pytest.mark.parametrize(
    ("url", "method"),
    [
        ("env://", InitMethod()),
        ("tcp://node-0:29500", InitMethod("node-0", 29500)),
        (" tcp://10.0.0.1:1/ ", InitMethod("10.0.0.1", 1)),
        ("tcp://[fd00::2]:65535", InitMethod("fd00::2", 65535)),
        ("file:///shared/a b", InitMethod(path=Path("/shared/a b"))),
    ],
)
def test_urls_are_read_and_written_alike(url, method):
    assert parse(url) == method
    assert parse(str(method)) == method


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("10.0.0.1:29500", "it must be tcp://HOST:PORT, file:///PATH or env://"),
        ("http://node-0:29500", "it must be tcp://"),
        ("env://x", "it must be tcp://"),
        ("tcp://node-0", "a host and a port"),
        ("tcp://:29500", "a host and a port"),
        ("tcp://[]:29500", "a host and a port"),
        ("tcp://node-0:http", "a host and a port"),
        ("tcp://node-0:29500/x", "a host and a port"),
        ("tcp://me@node-0:29500", "a host and a port"),
        ("tcp://node-0:0", "ports go from 1 to 65535"),
        ("tcp://node-0:65536", "ports go from 1 to 65535"),
        ("tcp://node-0:29500?rank=0&world_size=2", "set RANK and WORLD_SIZE"),
        ("file://meeting", "from the root on"),
        ("file://", "from the root on"),
        ("file:///shared/", "from the root on"),
    ],
)
def test_what_cannot_be_a_meeting_point_is_refused(url, words):
    with pytest.raises(UsageError, match=words) as caught:
        parse(url, "--init-method")
    assert caught.value.got.startswith(f"--init-method {url!r}")
    with pytest.raises(UsageError, match=f"KWAY_INIT_METHOD={url[:8]!r}"[:-1].replace("[", r"\[")):
        chosen({"KWAY_INIT_METHOD": url})


def test_a_file_must_be_one_that_ranks_can_write_and_nobody_else_needs(tmp_path):
    check_file(tmp_path / "new")
    (tmp_path / "left").write_bytes(SIGN + b", and more")
    check_file(tmp_path / "left")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "thesis.txt").write_text("my thesis")
    for name, words in (
        ("thesis.txt", "holds something else"),
        ("empty", "is there, and empty"),
        ("pipe", "is no regular file"),
        ("", "is a folder"),
        ("missing/new", "no folder"),
    ):
        with pytest.raises(UsageError, match=words):
            check_file(tmp_path / name)
    assert (tmp_path / "thesis.txt").read_text() == "my thesis"


@pytest.mark.parametrize("begins", [SIGN, b"weights"])
def test_of_a_large_file_only_the_beginning_is_read(tmp_path, begins):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.write(begins)
        file.truncate(1 << 25)
    tracemalloc.start()
    try:
        with nullcontext() if begins == SIGN else pytest.raises(UsageError, match="holds something else"):
            check_file(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
