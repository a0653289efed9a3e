"""The demo: what this machine has, one training run on two or more devices, and the proof that it is right.

Runs in the environment that scripts/setup.py makes. Every command is echoed, so that it can be repeated.
"""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

KWAY = Path(sys.executable).with_name("kway")


def run(*arguments: str) -> None:
    """Echo and run one command of kway; where it fails, end with its exit code."""
    print(f"\n$ kway {shlex.join(arguments)}", flush=True)
    code = subprocess.run([KWAY, *arguments], check=False).returncode
    if code:
        sys.exit(code)


def device_set() -> str:
    """Choose all GPUs where there are several, else two CPU ranks: one device has nothing to prove."""
    found = subprocess.run([KWAY, "devices", "--json"], stdout=subprocess.PIPE, check=True)
    return "auto" if len(json.loads(found.stdout)["gpus"]) > 1 else "cpu:2"


def main() -> None:
    """Show, train, prove, and say where everything is."""
    folder = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    run("devices")
    common = ["lenet", "--data", "mnist5k", "--devices", device_set(), "--strategy", "data"]
    recipe = ["--batch-size", "64", "--optimizer", "momentum", "--lr", "0.1", "--epochs", "10"]
    run("train", *common, *recipe, "--out", str(folder))
    run("prove", *common, "--batch-size", "13", "--precision", "fp64", "--out", str(folder))
    print(f"\nIn {folder}:")
    for file in sorted(folder.iterdir()):
        print(f"  {file.name}")
    print("train.json and proof.json are the records, the PNG shows loss and accuracy by epoch.")


if __name__ == "__main__":
    main()
