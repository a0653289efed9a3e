"""One rank of a candidate: the real step of kway, started at every compared step from the reference's state."""

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kway.checkpoints.names import own_names, own_weights
from kway.data.order import Indices
from kway.data.padding import uneven
from kway.data.parts import Parts
from kway.flat import flat
from kway.job import Job
from kway.proving.quiet import without_dropout
from kway.step.build import build
from kway.step.settings import Settings
from kway.step.state import load_buffers
from kway.step.storage import read_tensors, to_bytes
from kway.strategies.engine import Engine
from kway.world import World

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class CandidateSpec:
    """What every rank of a candidate needs. ``folder`` holds ``before-S.safetensors`` for each step S and gets
    ``after-S.safetensors``. ``batches``: (epoch, global data set indices) of each step. ``free``:
    run on from the first state, dropout on, and leave no files. ``step_kind``, ``settings``: how steps are to run.
    """

    job: Job
    parts: Parts
    layout: dict[str, int]
    level: str
    folder: str
    batches: list[tuple[int, Indices]]
    shards: int = 8
    free: bool = False
    step_kind: str = "eager"
    settings: dict[str, Any] = field(default_factory=dict)


def before_file(folder: str | Path, step: int) -> Path:
    """Return where the reference's state before a step lies."""
    return Path(folder) / f"before-{step}.safetensors"


def after_file(folder: str | Path, step: int) -> Path:
    """Return where the candidate's tensors after a step lie."""
    return Path(folder) / f"after-{step}.safetensors"


def after(folder: str | Path, step: int) -> State:
    """Read the candidate's tensors after a step."""
    return read_tensors(after_file(folder, step))


def run(world: World, spec: CandidateSpec, model: nn.Module | None = None) -> dict[str, Any]:
    """Take all steps. Returns ``shares`` (samples by step and rank); ``strays``: for each step, the first tensor
    in which a rank differs from rank 0, as (rank, tensor), or ``None``; ``digests``: for each step, the SHA-256
    of every tensor of rank 0 by name; ``step_kind`` and ``notices``: how the steps really ran, and why; ``doubts``:
    what may follow the number of devices, and ``loss_doubts``, those about the loss; ``uneven``: that parts of one
    batch came in several shapes.
    """
    model = build(spec.job) if model is None else model
    largest = max(len(indices) for _, indices in spec.batches)
    shares, strays, digests = [], [], []
    with nullcontext() if spec.free else without_dropout(model):
        engine = Engine(
            spec.job,
            model,
            spec.layout,
            world,
            spec.level,
            largest,
            spec.shards,
            step_kind=spec.step_kind,
            settings=Settings.of(spec.settings),
        )
        shapes = engine.shapes(spec.parts)
        try:
            for step, (epoch, indices) in enumerate(spec.batches):
                if not (spec.free and step):
                    _load(engine, read_tensors(before_file(spec.folder, step)))
                share = engine.cut(spec.parts, indices, epoch, step)
                shapes.take(share)
                outcome = engine.step(share, step)
                result = _tensors(engine, outcome.loss)
                if spec.free and spec.job.ema is not None:
                    result |= _average(engine)
                group = engine.mesh.world
                shares.append(group.objects(share.count))
                every = group.objects({name: _digest(value) for name, value in result.items()})
                strays.append(_stray(every))
                digests.append(every[0])
                if world.is_main and not spec.free:
                    after_file(spec.folder, step).write_bytes(to_bytes(result))
            ran, notices = engine.ran, [*engine.notices, *engine.at_the_end]
            doubts, loss_doubts = engine.doubts, engine.loss_doubts
            padded = uneven(engine.mesh.world.objects, shapes)
        finally:
            engine.close()
    return {
        "shares": shares,
        "strays": strays,
        "digests": digests,
        "step_kind": ran,
        "notices": notices,
        "doubts": doubts,
        "loss_doubts": loss_doubts,
        "uneven": padded,
    }


def _load(engine: Engine, state: State) -> None:
    parts: dict[str, State] = {"model": {}, "optimizer": {}, "buffers": {}}
    saved = own_weights(engine.model, engine.model.state_dict())
    # The reference goes by the names that the model's tensors bear there, with prefixes where layers are wrapped.
    own = own_names(engine.model, [name.partition("/")[2] for name in state])
    for name, value in state.items():
        kind, rest = name.split("/", 1)
        rest = own[rest] if kind == "model" else rest
        parts["buffers" if kind == "model" and rest not in saved else kind][rest] = value
    engine.load(parts["model"], parts["optimizer"])
    load_buffers(engine.model, parts["buffers"], "the reference")


def _tensors(engine: Engine, loss: torch.Tensor) -> State:
    result = {"loss": loss.detach().cpu().clone()}
    result |= {f"gradient/{name}": value for name, value in engine.gradients().items()}
    model = {**dict(engine.model.named_buffers()), **engine.model.state_dict()}
    result |= {
        f"model/{n}": v.detach().cpu().clone() for n, v in model.items() if isinstance(v, torch.Tensor)
    }
    result |= {f"optimizer/{name}": value for name, value in engine.optimizer_state().items()}
    return {name: value.contiguous() for name, value in result.items()}


def _average(engine: Engine) -> State:
    with engine.averaged():
        return {f"average/{n}": p.detach().cpu().clone() for n, p in engine.model.named_parameters()}


def _digest(value: torch.Tensor) -> str:
    return hashlib.sha256(flat(value).view(torch.uint8).numpy().tobytes()).hexdigest()


def _stray(digests: list[dict[str, str]]) -> tuple[int, str] | None:
    first = digests[0]
    for rank, own in enumerate(digests):
        for name in {**first, **own}:
            if own.get(name) != first.get(name):
                return rank, name
    return None
