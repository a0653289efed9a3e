"""``kway train``: trains a model on any number of devices."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kway.cli import options

if TYPE_CHECKING:
    from kway.report.progress import Progress

HELP = "train a model on one device or many"
WRITTEN = (
    "train.json",
    "curves.png",
    "weights.safetensors",
    "ema.safetensors",
    "best.safetensors",
    "timeline.json.gz",
    "checkpoints/",
    "tensorboard/",
    "logs/",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    options.model(parser)
    options.loss(parser)
    options.step(parser, tunes=True, plans=True)
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="plan.json of kway plan: devices, strategy, step kind and batch as it says",
    )
    parser.add_argument(
        "--tune-seconds",
        type=float,
        metavar="S",
        help="measure for about S seconds which way to run the steps is fastest (default: a twentieth of a long run, "
        "60 s at most, over data in memory; nothing in short runs, at level bits and where --step-kind is named)",
    )
    parser.add_argument(
        "--no-tune", action="store_true", help="measure nothing, and use nothing measured before"
    )
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="(default 10)")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="stop after N optimizer steps, or after --epochs"
    )
    parser.add_argument(
        "--batch-size-per-device", type=int, metavar="N", help="global batch = N times the number of devices"
    )
    parser.add_argument(
        "--lr-scale",
        metavar="RULE",
        help="scale the learning rate of one device for --batch-size-per-device: linear (times the number of devices) "
        "or sqrt (default: it stays)",
    )
    parser.add_argument(
        "--lr-warmup",
        metavar="N",
        help='epochs, or like "200steps", over which --lr-scale rises from the rate of one device (default 5 epochs, a '
        "tenth of the run where that is less; 0: none)",
    )
    parser.add_argument("--clip-norm", type=float, metavar="X", help="largest norm of the whole gradient")
    parser.add_argument("--clip-value", type=float, metavar="X", help="largest entry of the gradient")
    parser.add_argument(
        "--validate-every", default="1", metavar="N", help='epochs, or like "200steps" (default 1)'
    )
    parser.add_argument(
        "--log-every",
        type=int,
        default=10,
        metavar="N",
        help="steps between two looks at the loss, for the line that shows progress: on a terminal it is redrawn in "
        "place, elsewhere one comes every 30 s at most, beside the lines of epochs (default 10)",
    )
    parser.add_argument(
        "--save-best", metavar="NAME", help="keep best.safetensors by validation_loss or a metric"
    )
    parser.add_argument(
        "--early-stop", metavar="NAME", help="stop when validation_loss or a metric no longer gets better"
    )
    parser.add_argument(
        "--patience", type=int, metavar="N", help="validations in a row that --early-stop waits (default 3)"
    )
    parser.add_argument(
        "--ema", type=float, metavar="X", help="decay of a moving average of the weights, like 0.999"
    )
    parser.add_argument(
        "--checkpoint-every", metavar="T", help='save the whole run: like "200s", "500steps" or epochs'
    )
    parser.add_argument("--keep", type=int, metavar="N", help="newest checkpoints that stay (default all)")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest complete checkpoint of --out"
    )
    parser.add_argument(
        "--resume-from",
        type=Path,
        metavar="DIR",
        help="go on from a checkpoint, or the newest of another run",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start again on the devices that are left when a rank dies, at most N times (default 0)",
    )
    parser.add_argument(
        "--min-devices", type=int, default=1, metavar="N", help="fewest devices to go on with (default 1)"
    )
    parser.add_argument(
        "--on-oom",
        default="error",
        metavar="WAY",
        help="when memory runs out: error ends the run and says what lay there; adapt starts it again from the last "
        "complete checkpoint, with half as many samples at once (--micro-batch) or, where that cannot be, activation "
        "checkpointing (--settings recompute=true), and the same global batch (default error)",
    )
    parser.add_argument(
        "--timeline",
        type=int,
        nargs="?",
        const=True,
        metavar="N",
        help="record N steps of every rank (5 where no number is given) through torch's profiler, after 6 of warm-up: "
        "timeline.json.gz for ui.perfetto.dev, and a table of compute, communication, input wait and idle time",
    )
    parser.add_argument(
        "--tracker",
        metavar="NAME[,NAME]",
        help="also hand the figures to tensorboard (event files in the run's folder), wandb or mlflow",
    )
    parser.add_argument("--quiet", action="store_true", help="show warnings and errors only")
    options.stall(parser)
    options.init_method(parser)
    options.output(parser, "records, curves, logs and weights")


def _check(args: argparse.Namespace) -> None:
    """Raise ``UsageError`` for flags that do not go together."""
    from kway.errors import UsageError
    from kway.training.growing import growth_of

    planned = args.strategy == "auto" or args.plan is not None
    growth_of(args.batch_size_per_device, args.lr_scale, args.lr_warmup, planned=planned)
    if args.batch_size is not None and args.batch_size_per_device is not None:
        raise UsageError("--batch-size and --batch-size-per-device", "only one of them", "leave one out")
    if args.clip_norm is not None and args.clip_value is not None:
        raise UsageError("--clip-norm and --clip-value", "only one of them", "leave one out")
    if args.patience is not None and args.early_stop is None:
        raise UsageError(
            "--patience without --early-stop",
            "there is nothing to wait for",
            "name a figure: --early-stop validation_loss",
        )
    if args.resume and args.resume_from is not None:
        raise UsageError(
            "--resume and --resume-from",
            "only one of them",
            "--resume for the run in --out, --resume-from for another",
        )
    if args.resume and args.out is None:
        raise UsageError(
            "--resume without --out", "its checkpoints are looked for there", "name the run's folder"
        )


class _Warned:
    """Shows nothing of a run but its warnings."""

    def __call__(self, event: str, record: dict[str, Any]) -> None:
        if event == "warning":
            print(f"kway: warning: {record['text']}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class _Shown:
    """Shows the events of a run, under a header that comes when it begins."""

    def __init__(
        self, args: argparse.Namespace, header: list[str], screen: Any, progress: "Progress"
    ) -> None:
        self.progress, self._noted, self._last = progress, set[str](), set[str]()
        self._args, self._header, self._screen, self._begun = args, header, screen, False
        # The line of each name that stands last; warnings of the start before, after one.
        self._stands: dict[str, str] = {}
        self._before = set[str]()

    def __call__(self, event: str, record: dict[str, Any]) -> None:
        from kway.cli._config import config_lines
        from kway.step.kinds import DEFAULT_KIND

        if not self._begun:
            self._begun = True
            print("\n".join(self._header), file=self._screen, flush=True)
        if event == "start":
            kind = "" if self._args.step_kind in ("auto", DEFAULT_KIND) else f", {self._args.step_kind}"
            where = f"devices    {record['devices']} ({record['strategy']}, {self._args.exactness}{kind})"
            # Of a job that a file holds the flags say nothing, and what its functions make shows now.
            own = config_lines(record["job"])
            if not self._header[0].startswith("job"):
                # What another start chooses anew is how many samples are computed at once.
                own = [line for line in own if line.startswith("batch ")]
                if not self._stands:
                    # The header has it of the first start, if in other words: so many a device, say.
                    self._stands = {"batch": own[0]}
            self._start([*own, where])
        if event == "notice":
            self._noted.add(record["text"])
        if event == "epoch":
            self._last.clear()
        if event == "warning":
            self._last.add(record["text"])
        self.progress({"event": event, **record})

    def _start(self, lines: list[str]) -> None:
        """Show those lines of a start that neither the header nor a start before has shown."""
        for line in lines:
            name = line.partition(" ")[0]
            if self._stands.get(name) != line:
                print(line, file=self._screen, flush=True)
            self._stands[name] = line
        # What led to the start before last is past, once another start was needed.
        self._noted |= self._before
        self._before = set(self._last)

    @property
    def said(self) -> set[str]:
        """What need not be said once more at the end: notices, and warnings since the last epoch's line."""
        return self._noted | self._last

    def close(self) -> None:
        """Leave the screen on a clean line."""
        self.progress.close()


def run(args: argparse.Namespace) -> int:
    """Train; returns 0. Raises ``UsageError`` before anything starts, and what a failed run raises."""
    # First: whether other ranks are there depends on it.
    options.meet(args)
    if not args.resume and args.resume_from is None:
        options.check_out(args, *(name.rstrip("/") for name in WRITTEN if name != "logs/"))
    from kway.cli._job import default_folder, job_of, says_that_data_is_usual
    from kway.devices.terminal import redraws
    from kway.jobs.alone import speaks
    from kway.jobs.training import train
    from kway.report.progress import Progress

    _check(args)
    fixed: dict[str, object] = {}
    if args.ema is not None:
        fixed["ema"] = args.ema
    for kind, limit in (("norm", args.clip_norm), ("value", args.clip_value)):
        if limit is not None:
            fixed["clip"] = (kind, limit)
    job, lines = job_of(args, **fixed)
    folder = args.out or default_folder(job.title)
    screen = sys.stderr if args.json else sys.stdout

    progress = Progress(screen, args.epochs, live=redraws(screen))
    shown = _Shown(args, lines, screen, progress)
    show = _Warned() if args.quiet else shown

    try:
        with says_that_data_is_usual(args, lines):
            result = train(
                job,
                **options.placed(args),
                tune=not args.no_tune,
                tune_seconds=args.tune_seconds,
                plan=args.plan,
                epochs=args.epochs,
                steps=args.steps,
                out=folder,
                callbacks=[show],
                trackers=[] if args.tracker is None else args.tracker.split(","),
                validate_every=args.validate_every,
                log_every=args.log_every,
                save_best=args.save_best,
                early_stop=args.early_stop,
                patience=args.patience,
                checkpoint_every=args.checkpoint_every,
                keep=args.keep,
                resume=args.resume_from or args.resume,
                max_restarts=args.max_restarts,
                min_devices=args.min_devices,
                on_oom=args.on_oom,
                stall_timeout=args.stall_timeout,
                timeline=args.timeline,
                batch_size_per_device=args.batch_size_per_device,
                lr_scale=args.lr_scale,
                lr_warmup=args.lr_warmup,
            )
    finally:
        show.close()
    saved = result.record.checkpoints
    lost = saved is not None and saved["failed"] and not [*(folder / "checkpoints").glob("step-*")]
    if not speaks():
        return int(bool(lost))
    if args.json:
        print(result.record.to_json())
    elif not args.quiet:
        _say_result(result, folder, shown.said)
    if lost and not args.json:
        print("kway: error: no checkpoint could be saved (see the notes)", file=sys.stderr)
    return int(bool(lost))


def _say_result(result: Any, folder: Path, said: set[str]) -> None:
    """Print what came out of a run. ``said``: the notes that were shown before."""
    from kway.report.plans import side_by_side
    from kway.report.timeline import lines_of
    from kway.report.tuning import choice_text
    from kway.units import counted

    for text in result.record.notices:
        if text not in said:
            print(f"note       {text}")
    step = result.record.measured_step_s
    timing = f"{step * 1e3:.2f} ms a step" if step is not None else "too few steps to time one"
    print(f"\n{counted(result.record.steps, 'step')}, {timing}; weights {result.record.weights_sha256[:16]}")
    if result.record.predicted_step_s is not None:
        chosen = {**result.record.settings, **(result.record.tuned or {}).get("choice", {})}
        print(side_by_side(result.record.predicted_step_s, step, choice_text(chosen) if chosen else ""))
    if result.record.timeline is not None:
        print("\n".join([*lines_of(result.record.timeline), ""]))
    there = [name for name in WRITTEN if (folder / name).exists()]
    # Those that the run went on from are not its own.
    wrote = [name for name in there if name != "checkpoints/" or result.record.checkpoints is not None]
    print(f"wrote      {folder}/: {', '.join(wrote)}")
