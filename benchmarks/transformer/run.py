"""kway's model ``gpt`` beside hand-written torch on one machine: the parts asked for, then one result from all rows.

Every part is a process of its own with a time limit; its rows go to ``--out`` with ``.rows.jsonl`` for the suffix
as they come. What has not settled is measured again while the time allows. Give several commands with ``--gpus``,
``--sizes`` and ``--parts`` where one may not last long enough, and join their rows with ``--merge``.
"""

import argparse
import datetime
import json
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import schedule  # noqa: E402
from gpt_plan import LIMITS, again, cpu_parts, gpu_parts, smoke_parts  # noqa: E402
from parts import Part, visible_gpus  # noqa: E402
from shares import summarise  # noqa: E402


def parts_of(options: argparse.Namespace, k: int) -> list[Part]:
    """List the wanted parts on k devices. The machine is always said, and on GPUs the peak."""
    if options.smoke:
        found = smoke_parts(k)
    elif options.cpu:
        found = cpu_parts(k, options.max_seconds)
    else:
        found = gpu_parts(k, options.sizes.split(","), options.yardstick)
    wanted = options.parts.split(",") if options.parts else [part.name for part in found]
    return [part for part in found if part.name in wanted or part.name.startswith(("machine", "peak"))]


def arguments() -> argparse.Namespace:
    """Read what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--yardstick", type=Path, help="folder of gpt.py; without it, that part is left out")
    parser.add_argument("--out", type=Path, default=HERE / "result.json", metavar="FILE")
    parser.add_argument("--gpus", default="1,4", help="numbers of GPUs, or of CPU ranks (default 1,4)")
    parser.add_argument("--sizes", default="124m,774m", help=f"of {', '.join(LIMITS)}, with commas between")
    parser.add_argument("--parts", help="only these, with commas between")
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
    if unknown := set(options.sizes.split(",")) - set(LIMITS):
        parser.error(f"--sizes {','.join(sorted(unknown))}: there are {', '.join(LIMITS)}")
    if options.yardstick is not None:
        options.yardstick = options.yardstick.resolve()
    return options


def main() -> int:
    """Measure, then summarise. Exit code 1 where a bar is missed, a figure has not settled or a part failed."""
    options = arguments()
    # Told to end, it ends the part that runs and its ranks, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    file = options.out.with_suffix(".rows.jsonl")
    counts = [int(text) for text in options.gpus.split(",")]
    if not options.merge:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        on_gpus = not (options.cpu or options.smoke)
        schedule.measure(
            lambda k: parts_of(options, k),
            counts,
            visible_gpus() if on_gpus else 2,
            file,
            options.seconds,
            again if on_gpus else None,
        )
    files = options.merge or [file]
    rows = [json.loads(line) for each in files for line in each.read_text().splitlines()]
    judged = ["gpu", "cpu"] if options.merge else [] if options.smoke else ["cpu" if options.cpu else "gpu"]
    result, table, ok = summarise(rows, options.sizes.split(","), counts, judged)
    result = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **result}
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(table)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
