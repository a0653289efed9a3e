"""Loads torch in a process of its own and tries what it can do: a broken installation may crash whoever loads it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# Loading torch from a cold network disk takes most of it.
LIMIT_S = 180
MARK = "kway found: "
_NUMBERS = 1024


def run(
    command: Sequence[str] = (sys.executable, "-P", "-m", "kway.devices.torch_probe"), limit: float = LIMIT_S
) -> dict[str, Any]:
    """Return what ``facts`` found in a new process, or ``error``: why there is nothing, in a line."""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"loading torch and trying it did not end within {limit:g} s"}
    found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if found and done.returncode == 0:
        return dict(json.loads(found[-1].removeprefix(MARK)))
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return {"error": _ended(done.returncode) + (f": {said[-1]}" if said else "")}


def facts() -> dict[str, Any]:
    """Import torch and try it here.

    ``version``, ``cuda``, ``hip``, ``seconds`` (that it all took), ``remembered`` (see ``torch_facts``), ``cpu``
    (whether a product on the CPU is right), ``gpus`` (for each that torch sees its ``name`` and ``error``, empty where
    it computed rightly), ``all_reduce`` (of all of them by NCCL in one process: ``error``; ``None`` where there are
    fewer than two) and ``mps`` (whether torch calls it usable).
    """
    begun = time.perf_counter()
    import torch

    from kway.devices import torch_facts

    remembered = torch_facts.remember()
    square = torch.ones(_NUMBERS, _NUMBERS)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [
        {"name": torch.cuda.get_device_name(i), "error": _tried(partial(_sum_on, i))} for i in range(count)
    ]
    several = count > 1 and remembered["backends"]["nccl"]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "remembered": remembered,
        "cpu": bool((square @ square == _NUMBERS).all()),
        "gpus": gpus,
        "all_reduce": {"error": _tried(partial(_sum_of_all, count))} if several else None,
        "mps": torch.backends.mps.is_available(),
        "seconds": time.perf_counter() - begun,
    }


def _tried(work: Callable[[], tuple[float, float]]) -> str:
    """Return why ``work``, which returns a number and the right one, went wrong; an empty text where it did not."""
    try:
        found, right = work()
    except Exception as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return "" if found == right else f"it computed {found:g} in place of {right:g}"


def _sum_on(index: int) -> tuple[float, float]:
    import torch

    return float(torch.arange(_NUMBERS, device=f"cuda:{index}").sum()), _NUMBERS * (_NUMBERS - 1) / 2


def _sum_of_all(count: int) -> tuple[float, float]:
    import torch
    from torch.cuda import nccl

    parts = [torch.full((_NUMBERS,), float(i + 1), device=f"cuda:{i}") for i in range(count)]
    nccl.all_reduce(parts)  # type: ignore[no-untyped-call]
    right = count * (count + 1) / 2
    off = [float(part[i]) for part in parts for i in (0, -1) if float(part[i]) != right]
    return (off[0] if off else right), right


def _ended(code: int) -> str:
    if code >= 0:
        return f"loading torch ended with exit code {code}"
    try:
        return f"loading torch was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"loading torch was ended by signal {-code}"


if __name__ == "__main__":
    print(MARK + json.dumps(facts()), flush=True)
