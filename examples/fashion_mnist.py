"""ResNet-18 on Fashion-MNIST: crops, mirror images, label smoothing and one cycle of the learning rate.

    python examples/fashion_mnist.py --data-dir DATA

trains on all GPUs and says whether 94.5 % of the held-out images were right, and after how many seconds of training.
``--help`` lists the settings; examples/README.md explains them.
"""

import argparse
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import kway
from kway import zoo
from kway.data import sources

SHAPE, CLASSES, PADDING = (1, 28, 28), 10, 2


class CropAndFlip(nn.Module):
    """Moves each image at random and mirrors every other one, in training; in evaluation they pass as they are.

    Images of shape (N, C, H, W), of any dtype and memory format, which are kept. Each is moved by up to ``padding``
    pixels in both directions, zeros coming in: a crop out of the image with a border of zeros.

    All of it happens where the images are, by arithmetic on tensors of fixed shapes: nothing is read back by the
    host, so that a step can be compiled and recorded. What is drawn comes from torch's generator, which kway seeds
    for each step: a run that is repeated, or goes on from a checkpoint, sees the same crops.
    """

    def __init__(self, padding: int = PADDING) -> None:
        super().__init__()
        self.padding = padding

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return images of the same shape."""
        if not self.training:
            return images
        count, device, most = len(images), images.device, self.padding
        down, right = torch.randint(-most, most + 1, (2, count), device=device)
        mirrored = torch.randint(2, (count,), device=device) == 1
        return cropped(images, down, right, mirrored)

    def extra_repr(self) -> str:
        """Say how far images are moved."""
        return f"padding={self.padding}"


def cropped(
    images: torch.Tensor, down: torch.Tensor, right: torch.Tensor, mirrored: torch.Tensor
) -> torch.Tensor:
    """Cut a window of its own size out of each image, zeros around it, and mirror it left to right where asked.

    ``images``: (N, C, H, W). ``down``, ``right``: where the windows begin, in pixels from the upper left corner of
    the image, int64 of shape (N,). ``mirrored``: bool of shape (N,).
    """
    count, channels, height, width = images.shape
    places = partial(torch.arange, device=images.device)
    rows = places(height) + down[:, None]
    columns = torch.where(mirrored[:, None], width - 1 - places(width), places(width)) + right[:, None]
    # Where each pixel comes from: shapes (N, 1, H, 1) and (N, 1, 1, W).
    rows, columns = rows[:, None, :, None], columns[:, None, None, :]
    outside = (rows < 0) | (rows >= height) | (columns < 0) | (columns >= width)
    each, channel = places(count)[:, None, None, None], places(channels)[:, None, None]
    found = images[each, channel, rows.clamp(0, height - 1), columns.clamp(0, width - 1)]
    return torch.empty_like(images).copy_(found.masked_fill(outside, 0))


def network(shape: tuple[int, ...] = SHAPE, classes: int = CLASSES, name: str = "resnet18") -> nn.Module:
    """Make an example model for images with the usual initial weights of deep ReLU networks (He et al., 2015)."""
    made = zoo.get(name)(shape, classes)
    for layer in made.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    # The layout that convolutions are fastest in.
    return made.to(memory_format=torch.channels_last)


def augmented(
    shape: tuple[int, ...] = SHAPE, classes: int = CLASSES, name: str = "resnet18", padding: int = PADDING
) -> nn.Module:
    """Make ``network`` with crops and mirror images before it."""
    layers = {"augment": CropAndFlip(padding), "network": network(shape, classes, name)}
    return nn.Sequential(OrderedDict(layers))


def optimizer(named: Iterable[tuple[str, nn.Parameter]], lr: float, decay: float) -> torch.optim.Optimizer:
    """Make SGD with Nesterov's momentum. Weights decay; biases and what normalisation scales by do not."""
    parameters = list(named)
    groups = [
        {"params": [pair for pair in parameters if pair[1].ndim > 1], "weight_decay": decay},
        {"params": [pair for pair in parameters if pair[1].ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)


def job_of(args: argparse.Namespace) -> kway.Job:
    """Make the job that the settings describe."""
    source = sources.load(args.data, args.data_dir, args.seed)
    steps = args.epochs * math.ceil(len(source.train) / args.batch_size)
    return kway.Job(
        model=partial(augmented, source.shape, source.classes, args.model, args.padding),
        loss=nn.CrossEntropyLoss(label_smoothing=args.smoothing),
        optimizer=partial(optimizer, lr=args.lr, decay=args.decay),
        # The momentum stays: a recorded step takes new learning rates, but holds all else as it was.
        schedule=partial(
            torch.optim.lr_scheduler.OneCycleLR,
            max_lr=args.lr,
            total_steps=steps,
            pct_start=args.warm_up,
            cycle_momentum=False,
        ),
        data=source.train,
        validation=source.validation,
        batch_size=args.batch_size,
        precision=args.precision,
        metrics={"accuracy": kway.accuracy},
        seed=args.seed,
        clip=args.clip,
        ema=args.ema,
        name=args.model,
    )


def reached(epochs: list[dict[str, Any]], target: float) -> tuple[int, float] | None:
    """Return the first epoch whose held-out accuracy is ``target`` at least, and the seconds of training up to its end.

    ``None`` where none is. Seconds are those of steps: evaluation is not in them.
    """
    seconds = 0.0
    for row in epochs:
        seconds += row["seconds"]
        if row["accuracy"] >= target:
            return row["epoch"], seconds
    return None


def summary(epochs: list[dict[str, Any]], target: float) -> str:
    """Say how good the last and the best epoch are, and when the target was reached."""
    best = max(epochs, key=lambda row: row["accuracy"])
    found = reached(epochs, target)
    when = f"reached after {found[1]:.1f} s of training, epoch {found[0]}" if found else "not reached"
    first, others = epochs[0]["seconds"], [row["seconds"] for row in epochs[1:]]
    each = f", {median(others):.2f} s each of the others" if others else ""
    return (
        f"last epoch  accuracy {epochs[-1]['accuracy']:.4f}\n"
        f"best epoch  accuracy {best['accuracy']:.4f}, epoch {best['epoch']}\n"
        f"target      {target:.4f} {when}\n"
        f"training    {first + sum(others):.1f} s: {first:.1f} s the first epoch{each}"
    )


def show(event: str, record: dict[str, Any]) -> None:
    """Print a line an epoch, and what kway has to say."""
    if event == "epoch":
        print(
            f"epoch {record['epoch']:3d}  loss {record['train_loss']:.4f}  accuracy {record['accuracy']:.4f}  "
            f"{record['seconds']:.2f} s",
            flush=True,
        )
    if event in ("notice", "warning"):
        print(f"{event}: {record['text']}", flush=True)


def settings(words: list[str] | None = None) -> argparse.Namespace:
    """Read the settings from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data-dir", type=Path, default=os.environ.get("KWAY_DATA"), help="folder that holds fashion-mnist/")
    add("--devices", default="auto", help="as kway train takes them: auto, 4, cpu:2, cuda:0,1")
    add("--epochs", type=int, default=20)
    add("--target", type=float, default=0.945, help="held-out accuracy to reach")
    add("--out", type=Path, help="folder for the record, curves and weights")
    add("--exactness", default="math", help="math, bits or loose")
    add("--shards", type=int, default=8, help="micro-shards of a batch at level bits")
    # 60,000 images are 125 such batches: a smaller last one would be compiled and recorded by itself.
    add("--batch-size", type=int, default=480, help="of all devices together")
    add("--lr", type=float, default=0.2, help="largest learning rate")
    add("--clip", type=float, help="largest norm of a step's gradients")
    add("--warm-up", type=float, default=0.2, help="part of all steps in which the rate rises")
    add("--decay", type=float, default=5e-4, help="weight decay")
    add("--smoothing", type=float, default=0.1, help="label smoothing")
    add("--padding", type=int, default=PADDING, help="pixels that a crop is moved by, at most")
    add("--ema", type=float, help="decay of averaged weights, which are then judged")
    add("--seed", type=int, default=0)
    add("--precision", help="bf16 on GPUs, else fp32, unless given")
    add("--step-kind", help="compiled-graph on GPUs, else eager, unless given")
    add("--model", default="resnet18", help="example model for images")
    add("--data", default="fashion-mnist", help="data set of images that kway knows by name")
    args = parser.parse_args(words)
    on_gpus = torch.cuda.is_available() and not args.devices.startswith("cpu")
    args.precision = args.precision or ("bf16" if on_gpus else "fp32")
    args.step_kind = args.step_kind or ("compiled-graph" if on_gpus else "eager")
    return args


def main(words: list[str] | None = None) -> None:
    """Train, and say what came out."""
    args = settings(words)
    try:
        run = kway.train(
            job_of(args),
            devices=args.devices,
            exactness=args.exactness,
            shards=args.shards,
            step_kind=args.step_kind,
            epochs=args.epochs,
            out=args.out,
            callbacks=[show],
        )
    except kway.UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    record = run.record
    count = f"{record.devices} device{'s' * (record.devices > 1)}"
    print(
        f"{record.model} on {count} ({', '.join(record.machine['gpus']) or 'CPU'}): {record.strategy}, "
        f"{record.exactness}, {record.step_kind}, {record.precision}, weights {record.weights_sha256[:16]}"
    )
    print(summary(run.epochs, args.target))


if __name__ == "__main__":
    main()
