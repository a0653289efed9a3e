"""Flags that several commands share."""

import argparse
import json
from pathlib import Path
from typing import Any


def model(parser: argparse.ArgumentParser, precision: str = "fp32; TF32 is off") -> None:
    """Add MODEL and the flags that make a job of it. Those of ``loss`` and ``training`` are apart."""
    from kway.data.sources import names as data_names
    from kway.job import PRECISIONS
    from kway.zoo import names as model_names

    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"an example ({', '.join(model_names())}; a size after a dash, gpt-10m or rnn-gru), "
        "package.module:name or path/file.py:name; "
        "the name is an nn.Module class, a function that makes one, or a Job",
    )
    parser.add_argument("--data", metavar="NAME", help=f"{', '.join(data_names())}, or path/file.py:name")
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="root with one folder a data set (or KWAY_DATA)"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="global batch, in samples (default: that of the Job or of the DataLoader, else 256)",
    )
    parser.add_argument("--precision", metavar="P", help=f"{', '.join(PRECISIONS)} (default {precision})")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="seed of weights, order and dropout (default 0)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="loader processes a rank")
    # A job is made from all of them, also where a command offers fewer.
    parser.set_defaults(loss=None, optimizer=None, lr=None, init=None, micro_batch=None)


def loss(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the loss, for commands that compute one."""
    from kway.cli._choices import LOSSES

    parser.add_argument("--loss", metavar="NAME", help=f"{', '.join(LOSSES)}, or path/file.py:name")


def training(parser: argparse.ArgumentParser) -> None:
    """Add the flags of optimizer and initial weights, for commands that take steps."""
    from kway.cli._choices import OPTIMIZERS

    parser.add_argument("--optimizer", metavar="NAME", help=f"{', '.join(OPTIMIZERS)}, or path/file.py:name")
    parser.add_argument("--lr", type=float, metavar="X", help="learning rate")
    parser.add_argument(
        "--init", metavar="FILE", help="weights to start from: a safetensors file, or a run's folder"
    )


def step(
    parser: argparse.ArgumentParser, tunes: bool = False, several: bool = False, plans: bool = False
) -> None:
    """Add the flags that say what a step is and where it runs, for commands that take steps.

    ``tunes``: for a command that can choose; ``several``: for one that runs in several places; ``plans``: for one whose
    ``--strategy auto`` plans.
    """
    training(parser)
    placing(parser, several, plans)
    exactness(parser)
    step_kind(parser, tunes)
    settings(parser)
    micro_batch(parser)


def micro_batch(parser: argparse.ArgumentParser) -> None:
    """Add the flag for how many samples are computed at once."""
    parser.add_argument("--micro-batch", type=int, metavar="N", help="most samples a device computes at once")


def placed(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the flags of ``step`` say of where and how steps run, as ``kway.train`` takes it."""
    return {
        "devices": args.devices,
        "strategy": args.strategy,
        "exactness": args.exactness,
        "shards": args.shards,
        "step_kind": args.step_kind,
        "settings": settings_of(args.settings),
    }


def placing(parser: argparse.ArgumentParser, several: bool = False, plans: bool = False) -> None:
    """Add the flags that say where to run. ``plans``: for a command whose ``--strategy auto`` plans."""
    sets = "auto, N, cpu:N or cuda:I,J" + ("; several: 1,2,3 or 'cpu:2 cuda:0,1'" if several else "")
    parser.add_argument("--devices", default="auto", metavar="SET", help=f"{sets} (default auto)")
    named = "single, data, threads, or with a size, data=N" + (
        " (several: by commas)"
        if several
        else "; auto: data over the devices, single where that is one, and no plan is made"
    )
    if plans:
        parser.add_argument(
            "--strategy",
            metavar="NAME",
            help="single, data, threads, or with a size, data=N; auto: the fastest, by a plan (default: data over the "
            "devices that --devices names; where it names none, over all GPUs, or one device on CPUs)",
        )
        return
    default = "data" if several else "auto"
    parser.add_argument("--strategy", default=default, metavar="NAME", help=f"{named} (default {default})")


def exactness(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what the same result means."""
    parser.add_argument(
        "--exactness", default="math", metavar="LEVEL", help="math, bits or loose (default math)"
    )
    parser.add_argument(
        "--shards", type=int, default=8, metavar="N", help="micro-shards of a batch at level bits (default 8)"
    )


def step_kind(parser: argparse.ArgumentParser, tunes: bool = False) -> None:
    """Add the flag that says how a step runs. ``tunes``: for a command that can choose."""
    from kway.step.kinds import DEFAULT_KIND, KINDS

    kinds = "; ".join(
        f"{kind.name}: {kind.summary}" + " (needs a GPU)" * (kind.needs is not None)
        for kind in KINDS.values()
    )
    parser.add_argument(
        "--step-kind",
        default="auto" if tunes else DEFAULT_KIND,
        metavar="KIND",
        help=("auto: what was measured to be fastest, or planned by --strategy auto; " if tunes else "")
        + f"{kinds} (default {'auto' if tunes else DEFAULT_KIND})",
    )


def settings(parser: argparse.ArgumentParser) -> None:
    """Add the flag that says what else of a step is chosen."""
    parser.add_argument(
        "--settings",
        metavar="NAME=VALUE[,...]",
        help="what else of a step is as named: memory_format (channels_last), optimizer (foreach, fused), attention "
        "(cudnn), autotune, "
        "compile_mode (searched, max-autotune), bucket_mib, overlap, threads, micro_batch, recompute "
        "(activation checkpointing of the model's blocks)",
    )


def settings_of(text: str | None) -> dict[str, object]:
    """Read ``--settings``: values as JSON has them, or plain words. Raises ``UsageError``."""
    from kway.errors import UsageError

    found: dict[str, object] = {}
    like = "it must be like optimizer=fused,autotune=true"
    if (text or "").lstrip().startswith(("{", "[")):
        raise UsageError(f"--settings {text!r}", like)
    for pair in filter(None, (text or "").split(",")):
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--settings {pair!r}", like)
        name = name.strip()
        if name in found:
            raise UsageError(f"--settings names {name} twice", "once is enough", "leave one out")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value.strip()
    return found


def output(parser: argparse.ArgumentParser, record: str, title: str = "MODEL") -> None:
    """Add the flags that say where results go."""
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"folder for {record} (default runs/TIME-{title})"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the record, and nothing else, on standard output"
    )


def check_out(args: argparse.Namespace, *files: str) -> None:
    """Raise ``UsageError`` where ``--out`` holds one of ``files`` already, before torch and data are loaded.

    The stage itself looks again. Ranks that are already there hear it of rank 0 in there, all at once.
    """
    if args.out is None:
        return
    from kway.jobs.alone import is_alone
    from kway.jobs.folder import check_free

    if is_alone():
        check_free(args.out, files)


def stall(parser: argparse.ArgumentParser) -> None:
    """Add the flag that ends a job which makes no progress."""
    parser.add_argument(
        "--stall-timeout",
        metavar="DURATION",
        help="like 90s or 5min: end the job where a rank that the others wait for makes no progress for so long, and "
        "say which, its step, phase and stack; longer than any single step, batch of an evaluation, save or start "
        "takes (default: wait as long as torch does)",
    )


def init_method(parser: argparse.ArgumentParser) -> None:
    """Add the flag that says where ranks meet."""
    parser.add_argument(
        "--init-method",
        metavar="URL",
        help="where ranks meet: tcp://HOST:PORT, file:///PATH or env:// (default: KWAY_INIT_METHOD, MASTER_ADDR and "
        "MASTER_PORT, or on one machine by themselves)",
    )


def meet(args: argparse.Namespace) -> None:
    """Let ranks that another launcher started meet where ``--init-method`` says. Raises ``UsageError``."""
    if args.init_method is None:
        return
    from kway.launch.torchrun import meet_at

    meet_at(args.init_method, "--init-method")
