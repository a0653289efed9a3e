"""What a run that has ended leaves in its folder beside weights and logs."""

from pathlib import Path

from kway.errors import KwayError
from kway.jobs.place import Place
from kway.records import Training


def kept(record: Training, where: Place, out: Path | str | None, folder: Path) -> Training:
    """Write record and curves where the run keeps something and this process speaks; return the record."""
    from kway.report.curves import draw

    if out is None or not where.is_main:
        return record
    try:
        record.save(folder)
        draw(record, folder / "curves.png")
    except OSError as error:
        raise KwayError(
            f"the record of the run cannot be written to {folder}: {error.strerror or error}",
            "the run itself has ended, and weights.safetensors was written before",
        ) from None
    return record
