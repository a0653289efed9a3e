"""Build kway's wheel, install it with the extra ``demo`` in an empty environment, train there and prove.

Versions are those of constraints.txt, torch's build follows the machine, as in scripts/setup.py. ``--here`` takes what
kway needs from the environment that this runs in, where there is no network: the wheel alone is installed.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from dist import ROOT, build
from setup import CONSTRAINTS, sees_gpu, torch_requests

RECIPE = "--batch-size 64 --optimizer momentum --epochs 6"
# What a user does first; in an empty folder, with nothing of the checkout in reach.
COMMANDS = (
    "kway --version",
    "kway devices",
    "kway completion bash",
    f"kway train lenet --data mnist5k --devices cpu:2 --strategy data {RECIPE} --out runs/first",
    "kway evaluate lenet --data mnist5k --weights runs/first",
    "kway prove lenet --devices 1,2",
    "kway plan lenet --on 8xh100",
)


def say(text: str) -> None:
    """Print one line of progress at once."""
    print(f"wheel: {text}", flush=True)


def main() -> None:
    """Build, install, run; end with exit code 1 and the output where something fails."""
    begun = time.time()
    archive, wheel = build(ROOT / "dist")
    say(
        f"{archive.name} ({archive.stat().st_size >> 10} KiB), {wheel.name} ({wheel.stat().st_size >> 10} KiB)"
    )
    with tempfile.TemporaryDirectory() as held:
        empty, work = Path(held) / "env", Path(held) / "work"
        work.mkdir()
        run([sys.executable, "-m", "venv", str(empty)], work)
        install(empty / "bin" / "python", wheel, work, here="--here" in sys.argv[1:])
        where = run([str(empty / "bin" / "python"), "-c", "import kway; print(kway.__file__)"], work).strip()
        if not Path(where).is_relative_to(empty):
            sys.exit(f"wheel: kway was imported from {where}, not from the environment")
        for line in COMMANDS:
            began = time.time()
            shown = run([str(empty / "bin" / "kway"), *shlex.split(line)[1:]], work)
            last = next((text for text in reversed(shown.splitlines()) if text.strip()), "")
            say(f"{line}: {time.time() - began:.1f} s: {last}")
    say(f"works, {time.time() - begun:.0f} s in all")


def install(python: Path, wheel: Path, work: Path, here: bool) -> None:
    """Install the wheel and what it needs; ``here``: what it needs is what this environment has."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if here:
        say("the packages of this environment, and the wheel before them")
        site = Path(
            run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], work).strip()
        )
        (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run([*pip, "--no-deps", "--no-index", str(wheel)], work)
        return
    say("an empty environment; fetching torch and the rest takes minutes, in silence")
    requests = torch_requests(sees_gpu())
    for request in requests:
        if run([*pip, *request, "-c", str(CONSTRAINTS)], work, must=request is requests[-1]) is not None:
            break
    run([*pip, f"{wheel}[demo]", "-c", str(CONSTRAINTS)], work)


def run(command: list[str], work: Path, must: bool = True) -> str | None:
    """Run a command in ``work`` and return its output; where it fails, ``None`` or, if it ``must``, the end."""
    own = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    done = subprocess.run(
        command,
        cwd=work,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return done.stdout
    if must:
        sys.exit(f"wheel: {shlex.join(command)} failed\n{done.stdout}")
    return None


if __name__ == "__main__":
    main()
