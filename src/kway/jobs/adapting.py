"""``on_oom="adapt"``: a run that ran out of memory goes on with fewer samples at once and the same global batch, or,
where that is not to be had, with activation checkpointing.
"""

from dataclasses import replace

from torch import nn

from kway.data.order import Order
from kway.errors import OutOfMemoryError, RefusedError, UsageError
from kway.job import Job
from kway.jobs.place import Place
from kway.records import Plan
from kway.registry import known
from kway.step.recompute import left_alone
from kway.strategies.levels import level_of
from kway.strategies.micro_batches import shares_of, why_whole
from kway.units import counted

WAYS = {"error": False, "adapt": True}
_ADAPT = "on_oom='adapt'"
# Phases of an out-of-memory error in which there are activations for backward.
_KEEPING = ("forward", "backward", "step")


class Adapting:
    """Chooses the ``micro_batch`` of the next start: half as many samples at once as in the last, down to 1; then, and
    where a share must not be cut, that the model's blocks are computed again in backward.

    ``is_on``: whether it does; without, an out-of-memory error is raised as it is. ``micro_batch``: of the first start,
    ``None`` for whole shares. ``most``: samples of the largest batch. ``whole``: why a share must not be cut, if so.
    ``blocks``: how many blocks of the model could be computed again, and are not.
    """

    def __init__(
        self, is_on: bool, micro_batch: int | None, most: int, whole: str | None = None, blocks: int = 0
    ) -> None:
        self.is_on, self.micro_batch, self.most = is_on, micro_batch, most
        self.whole, self.blocks = whole, blocks
        self._recomputes, self._tried = False, ""
        self._last: OutOfMemoryError | None = None

    def job(self, job: Job) -> Job:
        """Return ``job`` with the micro-batch to use now."""
        return replace(job, micro_batch=self.micro_batch)

    def place(self, where: Place) -> Place:
        """Return where the run goes, with the settings to use now."""
        if not self._recomputes:
            return where
        return replace(where, plan=replace(where.plan, settings={**where.plan.settings, "recompute": True}))

    def smaller(self, error: OutOfMemoryError, plan: Plan) -> str:
        """Choose what needs less; return a line for the user. Raises ``error`` where nothing would help."""
        chosen = (self.micro_batch, plan.settings.get("micro_batch"))
        most = min([-(-self.most // shares_of(plan.layout)), *(size for size in chosen if size)])
        # Of a last batch ranks hold a sample more or less, and which of them fails first must not count. Where fewer
        # were computed than half of what was chosen here, tuning chose them.
        now = most if 2 * error.samples > most else error.samples
        if not self.is_on:
            raise error
        before = self._tried
        if self.whole is None and error.is_by_samples and now > 1:
            self.micro_batch = now // 2
            self._tried = f"micro_batch={self.micro_batch}"
        elif self.blocks and not self._recomputes and error.phase in _KEEPING:
            self._recomputes = True
            self._tried = f"recompute=true (activation checkpointing of {counted(self.blocks, 'block')})"
        else:
            # The advice to try it would be none any more.
            error.do += f"\n  {_ADAPT} {self._why_not(error)}"
            raise error
        text = f"{error.got}: {error.need.splitlines()[0]}"
        if self._last is not None and self._last.phase == error.phase:
            text = f"out of memory again with {before} ({error.phase})"
        self._last = error
        return f"{text}; from now on {self._tried} ({_ADAPT}), the same global batch"

    def _why_not(self, error: OutOfMemoryError) -> str:
        """Say why nothing more is tried."""
        done = "; the model's blocks are computed again already" if self._recomputes else ""
        if self.whole is not None:
            return f"tries nothing more: a share must not be cut{done or f'; recompute: of no use in {error.phase}'}"
        few = error.samples == 1 or error.is_by_samples
        why = "1 sample at once is the fewest" if few else f"of no use in: {error.phase}"
        return f"tries no smaller micro-batch ({why}){done}"

    def refused(self, refused: RefusedError) -> Exception:
        """Return what to raise where a step refused to be cut: that memory ran out, where this tried to cut it."""
        if self._last is None:
            return refused
        self._last.do += f"\n  {_ADAPT} tried {self._tried}, which is refused: {refused}"
        return self._last


def adapting_of(on_oom: str, job: Job, model: nn.Module, where: Place, order: Order) -> Adapting:
    """Read ``on_oom`` for a run. Raises ``UsageError`` where nobody could adapt it, or not without another result."""
    is_on, plan = known("on_oom", on_oom, WAYS), where.plan
    if is_on and where.joined is not None:
        raise UsageError(
            f"{_ADAPT} inside ranks that another launcher started",
            "only who starts the ranks can start them again",
            "use that launcher's own, with a smaller micro_batch and resume=True",
        )
    most = min(order.batch_size, order.samples or order.batch_size)
    reason = why_whole(job, model, plan.layout, plan.exactness, most, plan.shards)
    # What the user has named stays as named.
    blocks = 0 if "recompute" in plan.settings else len(left_alone(model))
    if is_on and reason is not None and not blocks:
        raise RefusedError(
            f"{_ADAPT} (--on-oom adapt) at exactness {plan.exactness}",
            f"a run that computes fewer samples at once would be another one: {reason}; and "
            + (
                f"recompute={plan.settings['recompute']} is named"
                if "recompute" in plan.settings
                else "the model has no blocks that could be computed again"
            ),
            f"{_beforehand(job, model, plan, most)}, more devices, or leave on_oom out",
        )
    return Adapting(is_on, job.micro_batch, most, reason, blocks)


def _beforehand(job: Job, model: nn.Module, plan: Plan, most: int) -> str:
    """Name what can be chosen before the start for less memory, of a job whose shares nobody cuts unasked."""
    level = level_of(plan.exactness)
    if level.shards(plan.shards) is not None:
        return "choose more shards before the start (shards or --shards)"
    shares = shares_of(plan.layout)
    try:
        level.check(replace(job, micro_batch=1), model, shares, -(-most // shares), plan.shards)
    except RefusedError:
        return "choose a smaller batch before the start (batch_size or --batch-size), which is another run"
    return "choose before the start what fits (micro_batch or --micro-batch)"
