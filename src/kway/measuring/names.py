"""The names of all experiments, told without loading torch."""

from kway.registry import modules_of

FOLDER = "kway.measuring.experiments"


def names() -> list[str]:
    """List the names of all experiments."""
    return modules_of(FOLDER)
