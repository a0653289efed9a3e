"""Make the virtual environment that every make target runs in. Needs Python and nothing else.

The torch build follows the machine: the CPU build where no NVIDIA GPU is seen, the default build elsewhere.
``KWAY_SYSTEM_TORCH=1`` keeps the torch that this Python already has, for machines without a network.
A set-up that was interrupted leaves ``.venv/.making`` behind and starts from nothing the next time.
"""

# Read by any Python 3, so that one that is too old gets a sentence and not a SyntaxError.
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "constraints.txt"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
OLDEST = (3, 11)


def say(text):
    """Print one line of progress at once, also when the output is a pipe."""
    print("set-up: " + text, flush=True)


def stop(text):
    """End with one line on standard error."""
    sys.exit("set-up: " + text)


def sees_gpu():
    """Say whether the NVIDIA driver shows at least one GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return listed.returncode == 0 and b"GPU" in listed.stdout


def torch_pin():
    """Return the line of constraints.txt that names torch."""
    for line in CONSTRAINTS.read_text().splitlines():
        if line.startswith("torch=="):
            return line.strip()
    return stop("constraints.txt pins no torch")


def torch_requests(gpu):
    """List pip's arguments for torch, the preferred first."""
    plain = torch_pin()
    if gpu or sys.platform == "darwin":
        return [[plain]]
    cpu = plain + "+cpu"
    return [[cpu], [cpu, "--extra-index-url", CPU_WHEELS], [plain]]


def pip(*arguments):
    """Run the environment's pip quietly. Return an empty string, or what it printed where it failed."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    done = subprocess.run(
        [*command, *arguments], cwd=str(ROOT), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return "" if done.returncode == 0 else done.stdout.decode(errors="replace") or "pip failed"


def works():
    """Say whether the environment that is there can be built upon."""
    if (VENV / ".making").exists() or not PYTHON.exists():
        return False
    probe = "import pip, sys; sys.exit(sys.version_info < (%d, %d))" % OLDEST  # noqa: UP031
    return subprocess.run([str(PYTHON), "-c", probe], stderr=subprocess.DEVNULL, check=False).returncode == 0


def make_environment(system_packages):
    """Make ``.venv`` from nothing."""
    # The base interpreter: an activated .venv must be able to replace itself.
    base = sys.executable if system_packages else getattr(sys, "_base_executable", sys.executable)
    say("virtual environment in .venv, Python " + sys.version.split()[0])
    if VENV.exists():
        shutil.rmtree(str(VENV))
    VENV.mkdir()
    (VENV / ".making").touch()
    extra = ["--system-site-packages"] if system_packages else []
    if subprocess.run([base, "-m", "venv", *extra, str(VENV)], check=False).returncode:
        stop("this Python cannot make virtual environments: install its venv package (python3-venv)")


def install():
    """Install torch, then kway with the extras dev, demo and docs, at the versions of constraints.txt."""
    gpu = sees_gpu()
    requests = torch_requests(gpu)
    say("{}, {} build".format(requests[0][0], "default" if gpu else "CPU"))
    say("fetching and unpacking it takes a few minutes, in silence")
    problem = ""
    for request in requests:
        problem = pip(*request, "-c", str(CONSTRAINTS))
        if not problem:
            break
        say("not found: " + " ".join(request))
    if problem:
        stop("torch could not be installed\n" + problem)
    say("kway and its packages, versions as in constraints.txt")
    problem = pip("-e", ".[dev,demo,docs]", "-c", str(CONSTRAINTS))
    if problem:
        stop("kway could not be installed\n" + problem)


def install_beside_system_torch():
    """Install kway beside the torch that is there, taking other packages where they can be had."""
    say("KWAY_SYSTEM_TORCH is set: the torch that this Python has, other versions unpinned")
    if subprocess.run([str(PYTHON), "-c", "import torch"], stderr=subprocess.DEVNULL, check=False).returncode:
        stop("KWAY_SYSTEM_TORCH is set, but this Python has no torch: unset it")
    problem = pip("-e", ".[dev,demo,docs]")
    if problem:
        say("no package source in reach: kway alone, with the packages that are there")
        problem = pip("--no-build-isolation", "--no-deps", "-e", ".")
    if problem:
        stop("kway could not be installed\n" + problem)


def main():
    """Make or renew the environment and stamp it."""
    if sys.version_info < OLDEST:
        found = sys.version.split()[0]
        stop("Python {} is too old: kway needs 3.11 or newer (make PYTHON=python3.12 ...)".format(found))  # noqa: UP032
    begin = time.time()
    system_torch = os.environ.get("KWAY_SYSTEM_TORCH") == "1"
    if not works():
        make_environment(system_torch)
    (VENV / ".making").touch()
    if system_torch:
        install_beside_system_torch()
    else:
        install()
    check = "import torch, kway; print('torch', torch.__version__, 'and kway', kway.__version__)"
    tried = subprocess.run([str(PYTHON), "-c", check], stdout=subprocess.PIPE, check=False)
    if tried.returncode:
        stop("the environment does not work: importing torch and kway failed, see above")
    (VENV / ".making").unlink()
    (VENV / ".ready").touch()
    say("{} ready after {:.0f} s".format(tried.stdout.decode().strip(), time.time() - begin))  # noqa: UP032


if __name__ == "__main__":
    main()
