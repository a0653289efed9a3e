"""Train and prove the seeds on 1, 2 and 4 GPUs of one machine, beside the yardstick's rows from the same run.

Every measurement is a process of its own with a time limit. Its rows are appended to ROWS (``--out`` with
``.rows.jsonl``) as they come, so that nothing is lost by what fails later; the summary is made from that file,
or from several with ``--merge``.
"""

import argparse
import datetime
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from parts import GRACE_S, Part, run, visible_gpus  # noqa: E402
from summary import summarise  # noqa: E402


def parts(options: argparse.Namespace, k: int) -> list[Part]:
    """List what to measure on k devices, what matters most first."""
    kway = str(HERE / "kway_part.py")

    def own(name: str, command: list[str], limit: float) -> Part:
        return Part(name, [kway, *command], limit, timed=True)

    shared = ["--k", str(k), *(["--cpu"] if options.cpu else ["--data", str(options.data)])]
    epochs = ["--epochs", "2"] if options.cpu else ["--epochs", "10"]
    resnet = ["train", "--model", "resnet18", "--precision", "fp32" if options.cpu else "tf32"]
    chosen = [
        own("machine", ["machine"], 60),
        own("lenet", ["train", "--model", "lenet", *epochs, *shared], 120),
        own("resnet18", [*resnet, *epochs, *shared], 150),
        own("proofs", ["prove", *(["--models", "lenet"] if options.cpu else []), *shared], 270),
    ]
    if options.yardstick is not None and not options.cpu:
        file = [str(HERE / "yardstick_part.py"), str(options.yardstick / "anchors.py")]
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={k}")
        chosen += [
            Part("yardstick-ddp", [*file, "peers"], 90, torchrun),
            Part("yardstick-seeds", [*file, "seeds", "--k", str(k)], 90),
        ]
    exact = ["train", "--model", "lenet", "--level", "bits", "--epochs", "2", *shared]
    chosen.append(own("lenet-bits", exact, 90))
    if k > 1:
        chosen.append(own("resnet18-loose", [*resnet, *epochs, "--level", "loose", *shared], 150))
    wanted = options.parts.split(",") if options.parts else [part.name for part in chosen]
    return [part for part in chosen if part.name in wanted]


def rows_file(options: argparse.Namespace) -> Path:
    """Return where the rows go."""
    out: Path = options.out
    return out.with_suffix(".rows.jsonl")


def measure(options: argparse.Namespace) -> None:
    """Run all parts for every k that this machine has devices for, as long as the time allows."""
    deadline = time.monotonic() + options.seconds
    available = 2 if options.cpu else visible_gpus()
    for k in [int(text) for text in options.gpus.split(",")]:
        if k > available:
            print(f"k={k} left out: {available} devices", flush=True)
            continue
        for part in parts(options, k):
            left = deadline - time.monotonic()
            if left < GRACE_S:
                print(f"k={k} {part.name} left out: no time", flush=True)
                continue
            run(part, k, rows_file(options), min(part.limit, left), options.data)


def main() -> int:
    """Measure, then summarise. Exit code 1 where a bar is missed or a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="root of the data sets, with fashion-mnist/ in it")
    parser.add_argument("--yardstick", type=Path, help="folder of anchors.py; without, no rows of others")
    parser.add_argument("--out", type=Path, default=HERE / "result.json", metavar="FILE")
    parser.add_argument("--gpus", default="1,2,4", help="numbers of GPUs (default 1,2,4)")
    parser.add_argument("--parts", help="only these, with commas between")
    parser.add_argument("--seconds", type=float, default=3600, help="start nothing after this time")
    parser.add_argument("--cpu", action="store_true", help="a smoke run: tiny, on CPU ranks; judges nothing")
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="ROWS", help="measure nothing: summarise these"
    )
    options = parser.parse_args()
    if not options.cpu and not options.merge and options.data is None:
        parser.error("--data is needed")
    if not options.merge:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        measure(options)
    files = options.merge or [rows_file(options)]
    rows = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]
    result, table, ok = summarise(rows, judge=not options.cpu)
    result = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **result}
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(table)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
