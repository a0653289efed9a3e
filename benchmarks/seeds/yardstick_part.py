"""The cheap rows of a yardstick file, in the ranks that are there: plain DDP, LeNet as one graph, the seeds.

    torchrun --nproc-per-node K yardstick_part.py FILE peers [--packages accelerate,lightning] [--seconds S]
    python yardstick_part.py FILE seeds --k K [--models lenet,resnet18]

The file times much more, and what it compiles takes minutes. It is loaded as a module, and what is not wanted
is taken out from outside: candidates other than plain DDP and LeNet's graph are neither compiled nor run.
"""

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

# The names of the step functions in the file: plain DDP, and the whole step as one graph.
WANTED = ("step", "step5")
# The step function of each package that the file tries.
PACKAGES = {"accelerate": "step3", "lightning": "step4"}
SEED_EPOCHS = 3
MIN_EPOCHS, MAX_EPOCHS = 4, 16


def load(file: Path) -> ModuleType:
    """Import the file by its path, under a name by which loader workers find nothing to import again."""
    spec = importlib.util.spec_from_file_location("yardstick", file)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["yardstick"] = module
    spec.loader.exec_module(module)
    return module


def only_cheap(module: ModuleType, packages: list[str], seconds: float | None) -> None:
    """Keep plain DDP, graphs of what needs no compiler, and the named packages; drop the rows of all others.

    ``seconds``: how long to time each, in epochs of which there are 4 to 16 after the first; ``None``: as the
    file says.
    """
    timed: Callable[..., list[float]] = module.epoch_times
    wanted = [*WANTED, *(PACKAGES[name] for name in packages)]

    def epoch_times(step: Any, *arguments: Any, **options: Any) -> list[float]:
        if step.__name__ not in wanted:
            return [math.nan]
        if seconds is None:
            return timed(step, *arguments, **options)
        first = timed(step, *arguments, epochs=1)
        # Every rank takes as many: the slowest one's first epoch decides.
        slowest = torch.tensor(first[0], dtype=torch.float64, device="cuda")
        torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
        more = min(MAX_EPOCHS, max(MIN_EPOCHS, round(seconds / float(slowest))))
        return first + timed(step, *arguments, epochs=more)

    compiled = torch.compile

    def compile_nothing(model: Any = None, **options: Any) -> Any:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            return model  # it belongs to a candidate that is not run
        if isinstance(model, torch.nn.Module):
            raise RuntimeError("left out: compiling takes minutes")
        return compiled(model, **options)  # what a package marks while it is imported

    module.epoch_times = epoch_times  # type: ignore[attr-defined]
    module.say = say  # type: ignore[attr-defined]
    torch.compile = compile_nothing  # type: ignore[assignment]
    for name in PACKAGES:
        if name not in packages:
            sys.modules[name] = None  # type: ignore[assignment]


def say(**row: Any) -> None:
    """Print a row that holds a measurement."""
    seconds = row.get("s_epoch")
    if "failed" in row.get("what", ""):
        print(f"{row['what']}: {row.get('err')}", file=sys.stderr, flush=True)
        return
    if seconds is not None and math.isnan(seconds):
        return
    row["precision"] = "tf32"  # the file's own default for what it calls fp32
    print(json.dumps({"kind": "yardstick", **row}), flush=True)


def seeds(module: ModuleType, k: int, models: list[str]) -> None:
    """Run the seeds of ``models`` on the first ``k`` GPUs. Where torchvision is missing, its data set is replaced."""
    images, labels, *test = module.load()
    reader = "torchvision"
    if importlib.util.find_spec("torchvision") is None:
        reader = "tensors"

        def loader(batch: int) -> Any:
            data = module.Tensors(images, labels)
            return torch.utils.data.DataLoader(data, batch, shuffle=True, num_workers=4)

        module.seed_loader = loader  # type: ignore[attr-defined]
    module.say = lambda **row: say(reader=reader, **row)  # type: ignore[attr-defined]
    if "lenet" in models:
        module.seed_lenet(k, SEED_EPOCHS, test)
    if "resnet18" in models:
        module.seed_resnet(k, 256 * k, 0.1 * k, SEED_EPOCHS, test)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("what", choices=["peers", "seeds"])
    parser.add_argument("--k", type=int, default=1)
    parser.add_argument("--models", default="lenet,resnet18", help="which seeds")
    parser.add_argument("--packages", default="", help=f"of {', '.join(PACKAGES)}: time these, too")
    parser.add_argument("--seconds", type=float, help="time each peer for so long (default: three epochs)")
    options = parser.parse_args()
    module = load(options.file)
    # As the file sets them when it is run as a script.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if options.what == "seeds":
        seeds(module, options.k, options.models.split(","))
        return
    only_cheap(module, [name for name in options.packages.split(",") if name], options.seconds)
    module.peers()


if __name__ == "__main__":
    main()
