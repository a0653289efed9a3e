"""Which checkpoint a run goes on from."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kway.checkpoints.loading import check_names, misfit
from kway.checkpoints.manifest import MANIFEST
from kway.checkpoints.names import own_parameters
from kway.checkpoints.optimizer import options_by_name
from kway.checkpoints.reading import Checkpoint, check_step, newest, open_checkpoint
from kway.errors import UsageError
from kway.job import Job, check_path
from kway.records import Plan
from kway.step.build import make_optimizer, make_schedule
from kway.step.kinds import check_kind
from kway.step.made import unmade
from kway.step.scaling import own_schedule
from kway.step.seeds import preserved_everywhere
from kway.step.settings import Settings, check_settings
from kway.step.state import check_schedule_kept, made_in
from kway.training.began import Began, began, differing_beginnings
from kway.training.facts import check_parts, differing
from kway.training.on_a_copy import copied
from kway.training.saving import FOLDER


def check_saving(out: Any, every: Any, keep: Any, resume: bool | Path | str) -> None:
    """Raise ``UsageError`` where checkpoints have nowhere to go, or nothing makes them."""
    if every is not None and out is None:
        raise UsageError(
            f"checkpoint_every={every!r} without a folder", "checkpoints are kept there", "set out="
        )
    if not isinstance(resume, bool | str | Path) or resume == "":
        raise UsageError(f"resume={resume!r}", "it must be True, False or the path of a run or a checkpoint")
    if not isinstance(resume, bool):
        check_path("resume", resume)
    if keep is not None and every is None:
        raise UsageError(f"keep={keep} without checkpoint_every", "there is nothing to keep")
    if resume is True and out is None:
        raise UsageError("resume=True without a folder", "its checkpoints are looked for there", "set out=")


def check_schedule(job: Job, model: nn.Module, every: Any, resume: bool | Path | str) -> None:
    """Raise ``UsageError`` for a schedule whose state no checkpoint can hold, where a run writes or reads any.

    So far as that is known at the start. One of torch's is not made for that. Others are, for parameters without
    memory; where that fails, the run's own one tells.
    """
    if every is None and resume is False:
        return
    factory, _ = own_schedule(job.schedule)
    kind = factory
    while isinstance(kind, partial):
        kind = kind.func
    if factory is None or (isinstance(kind, type) and kind.__module__ == torch.optim.lr_scheduler.__name__):
        return
    made = None
    with suppress(Exception), preserved_everywhere():
        bare = [
            (name, nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad))
            for name, p in model.named_parameters()
        ]
        made = factory(job.optimizer(iter(bare)))
    check_schedule_kept(made)


def saves_none(found: Path | None, every: Any) -> list[str]:
    """Say that a run goes on from the checkpoint ``found`` and saves none, where ``every`` is not set."""
    if found is None or every is not None:
        return []
    return [
        "goes on from a checkpoint and saves none itself, as --checkpoint-every (checkpoint_every=) is not given: what "
        "ends it before its time takes it back to there"
    ]


def as_begun(checkpoint: Checkpoint, plan: Plan, named: bool) -> Plan:
    """Return ``plan`` with step kind and settings of the run that a checkpoint is of, where its devices can do that.

    ``named``: whether the user has named the plan's step kind. Another one than the run's leaves the plan as it is.
    """
    before = checkpoint.part("plan")
    kind, settings = before.get("step_kind", plan.step_kind), before.get("settings", {})
    if named and kind != plan.step_kind:
        return plan
    try:
        check_kind(kind, plan.device_set)
        check_settings(Settings.of(settings), plan.exactness)
    except UsageError:
        return plan
    return replace(plan, step_kind=kind, settings={**settings, **plan.settings})


def find(
    out: Path | str | None,
    resume: bool | Path | str,
    facts: Mapping[str, Any],
    model: nn.Module,
    check: Callable[[Checkpoint], None],
    optimizer: Callable[[], Began],
    lenient: bool = False,
) -> tuple[Path | None, list[str]]:
    """Return the folder of the checkpoint to go on from, or ``None``, and lines for the user.

    ``resume``: ``False``; ``True`` for the newest complete one of ``out``; or a path: a checkpoint, a run's folder
    or its folder of checkpoints, which need not be there where ``lenient``. ``optimizer`` says how the job's
    and its schedule begin, and is called only where something else differs. Raises ``UsageError`` for one that is not
    whole or does not fit, and what ``check`` raises.
    """
    if resume is False:
        return None, []
    told: list[str] = []
    checkpoint: Checkpoint | None
    place = Path(str(out)) if resume is True else Path(resume)
    try:
        place.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise UsageError(
            f"resume={str(place)!r} cannot be read: {error.strerror or error}",
            "",
            "name a run or a checkpoint",
        ) from None
    if (place / MANIFEST).is_file():
        checkpoint = open_checkpoint(place)
        check_step(checkpoint)
        checkpoint.verify()
    else:
        place = place / FOLDER if (place / FOLDER).is_dir() or resume is True else place
        if resume is not True and not lenient and not place.is_dir():
            raise UsageError(
                f"resume={str(resume)!r}", "there is no such folder", "name a run or a checkpoint"
            )
        checkpoint = newest(place, told.append)
    if checkpoint is None and resume is not True and not lenient:
        # Named on purpose: to train from the start instead would pass for having gone on.
        raise UsageError(
            f"resume={str(resume)!r} holds no complete checkpoint",
            "; ".join(told) or "there is none in it",
            "name a run or a checkpoint, start from its weights (init=, --init), or leave it out to start anew",
        )
    if checkpoint is None:
        return None, [*told, f"no complete checkpoint in {place}: the run starts anew"]
    check_parts(checkpoint)
    _check_job(checkpoint, facts, model, optimizer)
    check(checkpoint)
    return checkpoint.path.resolve(), [*told, *_went_further(place.parent / "train.json", checkpoint)]


def _check_job(
    checkpoint: Checkpoint, facts: Mapping[str, Any], model: nn.Module, optimizer: Callable[[], Began]
) -> None:
    """Raise ``UsageError`` where a checkpoint is of another job: with all that differs, so that it is told once."""
    differ = differing(checkpoint, facts)
    weights = unmade(checkpoint.weights(), made_in(checkpoint), model)
    unfit = misfit(model, weights)
    if not differ and unfit is None:
        return
    beginnings: dict[str, list[str]] = {}
    # What keeps an optimizer from being made is no part of what differs, and is told when the rest is right.
    with suppress(Exception):
        # Which parameters there are is said of the weights, where these do not fit.
        beginnings = differing_beginnings(checkpoint, optimizer(), names=unfit is None)
    factories = checkpoint.part("job").get("schedule"), facts.get("schedule")
    if factories[0] != factories[1] and all(each and "(" in each for each in factories):
        # Said already, by what it is made with.
        beginnings.pop("schedule", None)
    if unfit is not None:
        if not differ and not beginnings:
            check_names(model, weights, f"of checkpoint {checkpoint.path}")
        got, need, _ = unfit
        differ.append(f"weights: {got} ({need})")
    differ += [f"{what}: {'; '.join(lines)}" for what, lines in beginnings.items()]
    raise UsageError(
        f"checkpoint {checkpoint.path} is of another job: {'; '.join(differ)}",
        "going on would give a result that neither job gives from the start",
        "go on with the same job, or start a new run from its weights (init=, --init)"
        if unfit is None
        else "go on with the job that wrote it; its weights do not fit this model, also not to begin a new run from",
    )


def optimizer_of(job: Job, model: nn.Module) -> Began:
    """Return how the job's optimizer and schedule begin. Made on a copy of ``model``; raises what prevents it."""
    own, _ = copied(model, job)
    optimizer = make_optimizer(job, own)
    made = options_by_name(optimizer, own_parameters(own).items())
    return began(optimizer, own, made, make_schedule(job, optimizer))


def _went_further(record: Path, checkpoint: Checkpoint) -> list[str]:
    """Say where the run that a checkpoint is of has ended at a later step, of which nothing to go on from was kept."""
    try:
        ended = json.loads(record.read_text())["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if not isinstance(ended, int) or ended <= checkpoint.step:
        return []
    return [
        f"that run went on to step {ended:,}; its newest checkpoint is of step {checkpoint.step:,}, from which steps "
        "are taken again (init= or --init starts from its last weights)"
    ]
