"""Parts of the yardstick's floor.py and graph.py, whose whole runs take too long for one command; prints JSON rows.

    python yardstick_part.py DIR floor --precisions bf16,bf16w
    torchrun --nproc-per-node K yardstick_part.py DIR graph

The scripts are read from DIR and never copied: what is not wanted is taken out from outside.
"""

import argparse
import importlib
import io
import itertools
import json
import runpy
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

MODEL, BATCH = "resnet18", 256
AGAIN = 2


def say(**row: Any) -> None:
    """Print one row."""
    print(json.dumps({"kind": "yardstick", **row}), flush=True)


def ways(precisions: list[str]) -> list[tuple[str, str, bool, bool, bool]]:
    """List (precision, memory format, compiled, cudnn.benchmark, graph), those first that are fast as a rule.

    The last ones are lost where the time runs out.
    """
    found = itertools.product(
        (True, False), (True, False), ("channels_last", "contiguous"), precisions, (True, False)
    )
    return [
        (precision, form, compiled, bench, graph)
        for graph, compiled, form, precision, bench in found
        # As the script has it: nothing is compiled for other than benchmarked convolutions.
        if bench or not compiled
    ]


def floor(precisions: list[str]) -> None:
    """Time one step of ResNet-18 in every way, on one GPU, the best of them twice more."""
    import torch

    module = importlib.import_module("floor")
    formats = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
    times: dict[tuple[Any, ...], float] = {}

    def take(way: tuple[str, str, bool, bool, bool]) -> None:
        precision, form, compiled, bench, graph = way
        begun = time.monotonic()
        try:
            us: Any = module.step_us(module.resnet18, BATCH, precision, formats[form], compiled, bench, graph)
            times[way] = us
        except Exception as error:
            us = f"{type(error).__name__}: {error}"[:300]
        say(
            file="floor",
            m=MODEL,
            batch=BATCH,
            prec=precision,
            fmt=form,
            compile=compiled,
            bench=bench,
            graph=graph,
            us=us,
        )
        print(f"{way}: {us} in {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)

    for way in ways(precisions):
        take(way)
    if times:
        best = min(times, key=lambda way: times[way])
        for _ in range(AGAIN):
            take(best)


class Rows(io.TextIOBase):
    """Takes what a script prints and passes its JSON rows on, marked with where they come from."""

    def __init__(self, out: Any, **marks: Any) -> None:
        self._out, self._marks, self._line = out, marks, ""

    def write(self, text: str) -> int:
        """Pass on every whole line that is a JSON object; other lines go to standard error."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                self._out.write(json.dumps({"kind": "yardstick", **self._marks, **row}) + "\n")
                self._out.flush()
            elif line:
                print(line, file=sys.stderr, flush=True)
        return len(text)

    def flush(self) -> None:
        """Do what the script asks for; whole lines are out already."""
        self._out.flush()


def no_resnet(anchors: ModuleType) -> None:
    """Leave ResNet-18 out: the script says that it failed and goes on with LeNet."""

    def left_out() -> Any:
        raise RuntimeError("left out: no bar is held against it")

    anchors.resnet18 = left_out  # type: ignore[attr-defined]


def graph(folder: Path) -> None:
    """Run graph.py for LeNet in the ranks that are there; it ends the process."""
    no_resnet(importlib.import_module("anchors"))
    with redirect_stdout(Rows(sys.stdout, file="graph")):
        runpy.run_path(str(folder / "graph.py"), run_name="__main__")


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", choices=["floor", "graph"])
    parser.add_argument("--precisions", default="bf16,bf16w,fp32", help="of floor")
    options = parser.parse_args()
    sys.path.insert(0, str(options.folder))
    if options.what == "floor":
        floor(options.precisions.split(","))
    else:
        graph(options.folder)


if __name__ == "__main__":
    main()
