"""What the decisions of a run wait for: the figure that weights are kept by, or that ends it."""

from kway.errors import UsageError
from kway.job import Job
from kway.registry import unknown
from kway.training.spec import PATIENCE
from kway.training.validation import known_figure


def figure_of(job: Job, what: str, name: str | None) -> str | None:
    """Return the name of a validation figure that a decision waits for. Raises ``UsageError``."""
    if name is None:
        return None
    if job.validation is None:
        raise UsageError(f"{what}={name!r} without validation data", f"{what} is judged on validation data")
    if not isinstance(name, str) or not known_figure(name, job.metrics):
        also = "METRIC/KEY of a metric that returns a dict"
        raise unknown("validation figure", str(name), ["validation_loss", *job.metrics], also)
    return name


def patience_of(patience: int | None, early_stop: str | None) -> int:
    """Return how many validations ``early_stop`` waits. Raises ``UsageError`` where nothing waits."""
    if patience is None:
        return PATIENCE
    if early_stop is None:
        raise UsageError(
            f"patience={patience!r} without early_stop",
            "there is nothing to wait for",
            'name a figure: early_stop="validation_loss"',
        )
    return patience
