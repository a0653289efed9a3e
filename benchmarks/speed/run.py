"""kway beside the yardstick on one machine: the parts that are asked for, then one result from all rows.

Every part is a process of its own with a time limit; its rows go to ``--out`` with ``.rows.jsonl`` for the suffix
as they come. What has not settled is measured again while the time allows. Where one command may not last as
long as all of it takes, give several with ``--gpus`` and ``--parts`` and join them with ``--merge``.
"""

import argparse
import datetime
import json
import signal
import sys
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))

import schedule  # noqa: E402
from parts import Part, visible_gpus  # noqa: E402
from plan import KINDS, again, cpu_parts, gpu_parts, smoke_parts  # noqa: E402
from result import summarise  # noqa: E402


def parts_of(options: argparse.Namespace, k: int) -> list[Part]:
    """List the wanted parts on k devices. The machine is always said."""
    if options.smoke:
        found = smoke_parts(k)
    elif options.cpu:
        found = cpu_parts(k, options.data, options.max_seconds)
    else:
        found = gpu_parts(k, options.data, options.yardstick, options.kinds.split(","))
    wanted = options.parts.split(",") if options.parts else [part.name for part in found]
    return [part for part in found if part.name in wanted or part.name.startswith("machine")]


def measure(options: argparse.Namespace, file: Path) -> None:
    """Run the parts for every k that there are devices for; what has not settled again, until the time is over."""
    # The comparisons on the CPU repeat their rounds themselves.
    repeats = not (options.cpu or options.smoke)
    schedule.measure(
        partial(parts_of, options),
        [int(text) for text in options.gpus.split(",")],
        visible_gpus() if repeats else 2,
        file,
        options.seconds,
        (lambda part, k, rows: again(part, k, rows, options.data)) if repeats else None,
        options.data,
    )


def main() -> int:
    """Measure, then summarise. Exit code 1 where a bar is missed, a figure has not settled or a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="root of the data sets, with fashion-mnist/ in it")
    parser.add_argument("--yardstick", type=Path, help="folder of anchors.py, floor.py and graph.py")
    parser.add_argument("--out", type=Path, default=HERE / "result.json", metavar="FILE")
    parser.add_argument("--gpus", default="1,2,4", help="numbers of GPUs, or of CPU ranks (default 1,2,4)")
    parser.add_argument("--parts", help="only these, with commas between")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kway's step kinds, with commas between")
    parser.add_argument("--seconds", type=float, default=3600, help="end by this time (default 3600)")
    parser.add_argument(
        "--max-seconds", type=float, default=300, help="of a comparison on the CPU (default 300)"
    )
    parser.add_argument("--cpu", action="store_true", help="the comparisons on two cores")
    parser.add_argument("--smoke", action="store_true", help="tiny, on CPU ranks; judges no bar")
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="ROWS", help="measure nothing: summarise these"
    )
    options = parser.parse_args()
    # Told to end, it ends the part that runs and its ranks, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    needs_files = not (options.cpu or options.smoke or options.merge)
    if needs_files and (options.data is None or options.yardstick is None):
        parser.error("--data and --yardstick are needed")
    for name in ("data", "yardstick"):
        folder = getattr(options, name)
        setattr(options, name, None if folder is None else folder.resolve())
    file = options.out.with_suffix(".rows.jsonl")
    if not options.merge:
        file.parent.mkdir(parents=True, exist_ok=True)
        measure(options, file)
    files = options.merge or [file]
    missing = [str(each) for each in files if not each.exists()]
    if missing:
        parser.error(f"{', '.join(missing)}: no rows, nothing was measured")
    rows = [json.loads(line) for each in files for line in each.read_text().splitlines()]
    result, table, ok = summarise(rows, judge=not options.smoke)
    result = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **result}
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(table)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
