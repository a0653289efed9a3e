"""``kway predict``: a model's outputs over a data set, in its order."""

import argparse
import json
from pathlib import Path

from kway.cli import options

HELP = "outputs of trained weights, in the order of the data set"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    options.model(parser)
    options.placing(parser)
    options.init_method(parser)
    parser.add_argument(
        "--weights", required=True, type=Path, metavar="PATH", help="a run's folder, or a safetensors file"
    )
    options.output(parser, "predictions.safetensors")


def run(args: argparse.Namespace) -> int:
    """Predict; returns 0. Raises ``UsageError`` before anything starts."""
    # First: whether other ranks are there depends on it.
    options.meet(args)
    options.check_out(args, "predictions.safetensors")
    from safetensors.torch import save

    from kway.cli._job import default_folder, job_of
    from kway.cli.evaluate import on_what, weights_file
    from kway.jobs.alone import speaks
    from kway.jobs.evaluating import predict
    from kway.jobs.folder import claimed
    from kway.records import write_atomically

    weights = weights_file(args.weights)
    job, lines = job_of(args, False)
    where = {"devices": args.devices, "strategy": args.strategy}
    if not speaks():
        # The folder is rank 0's, which writes what all have predicted.
        predict(job, weights, batch_size=args.batch_size, **where)
        return 0
    with claimed(args.out or default_folder(f"{job.title}-predictions"), "predictions.safetensors") as folder:
        tensors = named_tensors(predict(job, weights, batch_size=args.batch_size, **where))
        path = folder / "predictions.safetensors"
        write_atomically(path, save({name: value.contiguous() for name, value in tensors.items()}))
    shapes = {name: list(value.shape) for name, value in tensors.items()}
    if args.json:
        print(
            json.dumps(
                {"kind": "prediction", "schema": 1, "model": job.title, "file": str(path), "tensors": shapes}
            )
        )
        return 0
    print("\n".join(line for line in lines if line.startswith(("model", "data", "job", "note"))))
    print(on_what(job))
    for name, shape in shapes.items():
        print(f"{name:<10} {shape}")
    print(f"wrote      {path}")
    return 0


def named_tensors(value: object, prefix: str = "output") -> dict:  # type: ignore[type-arg]
    """Flatten nested predictions to tensors by dotted names; a single tensor is called ``output``."""
    if isinstance(value, dict):
        items = [(f"{prefix}.{key}", item) for key, item in value.items()]
    elif isinstance(value, tuple | list):
        items = [(f"{prefix}.{place}", item) for place, item in enumerate(value)]
    else:
        return {} if value is None else {prefix: value}
    return {name: tensor for key, item in items for name, tensor in named_tensors(item, key).items()}
