"""Where no folder takes temporary files the user is told so, once, and nothing else is blamed or left."""

import os
import subprocess
import sys

import pytest

FILES = {
    "own.py": "import torch\ndef optimizer(named):\n    return torch.optim.Adam([value for _, value in named])\n",
    "script.py": "print('ran')\n",
}


# Files may not grow at all: what Python tries folders with fails in every one of them.
STARTED = ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", sys.executable, "-B", "-m", "kway"]
FORKED = (
    "import resource, sys; sys.dont_write_bytecode = True; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
    "from kway.cli.main import main; sys.exit(main())"
)


@pytest.mark.starts
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (STARTED, "train mlp --data synthetic --devices cpu:2 --steps 1 --out run"),
        (
            FORKED,
            "train mlp --data synthetic --devices cpu:1 --steps 1 --out run --optimizer own.py:optimizer",
        ),
        (FORKED, "prove mlp --data synthetic --devices cpu:2 --out run"),
        (STARTED, "launch --devices cpu:2 --logs logs script.py"),
    ],
    ids=["train", "optimizer", "prove", "launch"],
)
def test_without_any_temporary_folder_nothing_starts(tmp_path, leftovers, forked_commands, words, line):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    words = [*(words if words is STARTED else [sys.executable, "-c", FORKED]), *line.split()]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(
        "kway: error: no folder for temporary files can be written: No usable temporary"
    )
    assert done.stderr.endswith("; set TMPDIR to a folder with room\n")
    assert (done.stderr.count("\n"), done.stdout) == (1, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
