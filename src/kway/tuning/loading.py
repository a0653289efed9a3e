"""Whether other numbers of loader workers are tried for a job: how its samples are read, and whether again."""

from dataclasses import replace

from kway.data.digest import digest_of
from kway.data.fetch import Request
from kway.data.parts import Parts
from kway.data.share import reader
from kway.errors import line_of
from kway.job import Job
from kway.training.parts import training_parts
from kway.training.wish import Wish


def workers_of(parts: Parts, wish: Wish) -> tuple[int | None, str]:
    """Return the loader processes of a rank; ``None`` where there is no other number of them to try, and why.

    Data in memory is read by indexing. Unasked, code of the user's that runs in the rank is not moved to processes.
    """
    if parts.collate is None:
        return None, "the data is in memory"
    if parts.workers == 0 and wish.seconds is None:
        return None, "a run that nobody asked to tune starts none"
    return parts.workers, ""


def why_once(job: Job) -> str:
    """Return why workers may not read the samples of a job, or ``""`` where a sample is the same when it is read again.

    Of a data set that draws from a generator of its own, or counts, each worker would draw and count for itself.
    """
    parts = training_parts(replace(job, validation=None))[0]
    read, first = reader(parts, job.seed), Request(0, 0, 0, parts.order.batch(0, 0)[:1])
    try:
        same = digest_of(read(first)) == digest_of(read(first))
    except Exception as error:
        return f"to read a sample twice raises {line_of(error)}"
    return "" if same else "its samples are others when they are read again"
