"""Whether a run is too short for what is asked of it, whatever layout a plan will give it."""

from dataclasses import replace
from pathlib import Path

from kway.job import Job
from kway.records import Plan
from kway.strategies.layout import AUTO
from kway.training.parts import training_parts
from kway.training.spec import TrainSpec
from kway.training.timeline import check_timeline, timeline_steps


def check_length_for(
    job: Job, epochs: int, steps: int | None, timeline: int | bool | None, resume: bool | Path | str
) -> None:
    """Raise ``UsageError`` where a run is too short for its timeline, or of no length that can be."""
    nowhere = Plan(strategy=AUTO, layout={}, device_set=[], exactness="math", reason="not chosen yet")
    spec = TrainSpec(job, nowhere, "", epochs=epochs, steps=steps, timeline=timeline_steps(timeline))
    if spec.timeline is not None:
        an_epoch = training_parts(replace(job, validation=None))[0].order.steps(0)
        check_timeline(spec, an_epoch, bool(resume))
