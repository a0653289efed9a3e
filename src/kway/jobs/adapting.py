"""``on_oom="adapt"``: a run that ran out of memory goes on with fewer samples at once and the same global batch."""

from dataclasses import replace

from torch import nn

from kway.data.order import Order
from kway.errors import OutOfMemoryError, RefusedError, UsageError
from kway.job import Job
from kway.jobs.place import Place
from kway.records import Plan
from kway.registry import known
from kway.strategies.micro_batches import shares_of, why_whole

WAYS = {"error": False, "adapt": True}
_ADAPT = "on_oom='adapt'"


class Adapting:
    """Chooses the ``micro_batch`` of the next start: half as many samples at once as in the last, down to 1.

    ``is_on``: whether it does; without, an out-of-memory error is raised as it is. ``order``: of the training data.
    ``most``: samples of its largest batch.
    """

    def __init__(self, on_oom: str, job: Job, order: Order) -> None:
        self.is_on = known("on_oom", on_oom, WAYS)
        self.micro_batch = job.micro_batch
        self.most = min(order.batch_size, order.samples or order.batch_size)
        self._last: OutOfMemoryError | None = None

    def job(self, job: Job) -> Job:
        """Return ``job`` with the micro-batch to use now."""
        return replace(job, micro_batch=self.micro_batch)

    def smaller(self, error: OutOfMemoryError, plan: Plan) -> str:
        """Choose the next micro-batch; return a line for the user. Raises ``error`` where none would help."""
        chosen = (self.micro_batch, plan.settings.get("micro_batch"))
        most = min([-(-self.most // shares_of(plan.layout)), *(size for size in chosen if size)])
        # Of a last batch ranks hold a sample more or less, and which of them fails first must not count. Where fewer
        # were computed than half of what was chosen here, tuning chose them.
        now = most if 2 * error.samples > most else error.samples
        if not self.is_on:
            raise error
        if not error.is_by_samples or now < 2:
            # The advice to try it would be none any more.
            why = (
                "1 sample at once is the fewest"
                if error.samples == 1 or error.is_by_samples
                else f"of no use in: {error.phase}"
            )
            error.do += f"\n  {_ADAPT} tries no smaller micro-batch ({why})"
            raise error
        self._last, self.micro_batch = error, now // 2
        return (
            f"{error.got}: {error.need.splitlines()[0]}; from now on micro_batch={self.micro_batch} ({_ADAPT}), the "
            "same global batch"
        )

    def refused(self, refused: RefusedError) -> Exception:
        """Return what to raise where a step refused to be cut: that memory ran out, where this tried to cut it."""
        if self._last is None:
            return refused
        self._last.do += f"\n  {_ADAPT} tried micro_batch={self.micro_batch}, which is refused: {refused}"
        return self._last


def adapting_of(on_oom: str, job: Job, model: nn.Module, where: Place, order: Order) -> Adapting:
    """Read ``on_oom`` for a run. Raises ``UsageError`` where nobody could adapt it, or not without another result."""
    made, plan = Adapting(on_oom, job, order), where.plan
    if made.is_on and where.joined is not None:
        raise UsageError(
            f"{_ADAPT} inside ranks that another launcher started",
            "only who starts the ranks can start them again",
            "use that launcher's own, with a smaller micro_batch and resume=True",
        )
    reason = why_whole(job, model, plan.layout, plan.exactness, made.most, plan.shards)
    if made.is_on and reason is not None:
        raise RefusedError(
            f"{_ADAPT} (--on-oom adapt) at exactness {plan.exactness}",
            f"a run that computes fewer samples at once would be another one: {reason}",
            "choose before the start what fits (micro_batch or --micro-batch, at exactness bits --shards), more "
            "devices, or leave on_oom out",
        )
    return made
