import os
import subprocess
import sys

import pytest

from kway.checkpoints import hold
from kway.checkpoints.hold import Hold
from kway.errors import UsageError

TRY = """
import sys, time
from pathlib import Path
from kway.checkpoints.hold import Hold
Hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_is_one_s_own_until_it_is_let_go(tmp_path):
    first = Hold(tmp_path)
    with pytest.raises(UsageError, match=f"another run is at work in {tmp_path}"):
        Hold(tmp_path)
    assert list(tmp_path.iterdir()) == []
    first.close()
    first.close()
    Hold(tmp_path).close()


@pytest.mark.starts
def test_another_process_keeps_it_until_it_dies(tmp_path):
    with subprocess.Popen([sys.executable, "-c", TRY, str(tmp_path)], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(UsageError):
                Hold(tmp_path)
        finally:
            other.kill()
    Hold(tmp_path).close()


def test_a_child_that_was_forked_meanwhile_does_not_keep_it(tmp_path):
    first = Hold(tmp_path)
    assert first._handle is not None
    copy = os.dup(first._handle)
    first.close()
    Hold(tmp_path).close()
    os.close(copy)


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    def unknown(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(hold.fcntl, "flock", unknown)
    first = Hold(tmp_path)
    Hold(tmp_path).close()
    first.close()


def test_a_folder_that_was_taken_away_meanwhile_is_no_hold(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    real = os.open

    def opened(*arguments):
        handle = real(*arguments)
        folder.rmdir()
        return handle

    monkeypatch.setattr(hold.os, "open", opened)
    with pytest.raises(UsageError, match="another run"):
        Hold(folder)
