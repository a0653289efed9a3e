"""What a run that has ended leaves in its folder beside weights and logs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kway.errors import KwayError, line_of
from kway.jobs.place import Place
from kway.records import Training


def kept(
    record: Training, where: Place, out: Path | str | None, folder: Path, warn: Callable[[str], None]
) -> Training:
    """Write record and curves where the run keeps something and this process speaks; return the record.

    A picture that cannot be drawn is no loss: ``warn`` is told, and the record that is returned says so. Raises
    ``KwayError`` where the record cannot be written.
    """
    from kway.report.curves import draw

    if out is None or not where.is_main:
        return record
    try:
        record.save(folder)
    except OSError as error:
        raise KwayError(
            f"the record of the run cannot be written to {folder}: {error.strerror or error}",
            "the run itself has ended, and weights.safetensors was written before",
        ) from None
    try:
        draw(record, folder / "curves.png")
    except Exception as error:
        reason = str(error) if isinstance(error, KwayError) else line_of(error)
        line = f"the curves were not drawn: {reason}; train.json and weights.safetensors are complete"
        warn(line)
        return replace(record, notices=[*record.notices, line])
    return record
