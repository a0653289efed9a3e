"""Build the source archive, and out of it the wheel: what is left of older builds cannot get into either.

Needs setuptools and no network.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
LEFT_OUT = (".git", ".venv", "build", "dist", "runs", "*.egg-info", "__pycache__", ".*_cache")


def build(out: Path, root: Path = ROOT) -> tuple[Path, Path]:
    """Write source archive and wheel of ``root`` into ``out``, and return both paths."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as held:
        copy = Path(held) / "copy"
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        archive = out / _hook("build_sdist", out, copy)
        with tarfile.open(archive) as packed:
            packed.extractall(held, filter="data")
        wheel = out / _hook("build_wheel", out, Path(held) / archive.name.removesuffix(".tar.gz"))
    return archive, wheel


def _hook(name: str, out: Path, folder: Path) -> str:
    """Call a function of the build back end in ``folder``, and return the name of the file that it wrote."""
    command = [sys.executable, "-c", BUILD, name, str(out.resolve())]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed\n{done.stdout}{done.stderr}")
    return done.stdout.splitlines()[-1]
