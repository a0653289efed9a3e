"""What is to be planned."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from torch import nn

from kway.devices.cpu import threads_for
from kway.devices.select import parse_list, spelled
from kway.devices.topology import discover
from kway.errors import RefusedError, UsageError
from kway.job import Job
from kway.jobs.alone import refuse_among_ranks
from kway.jobs.identity import identity_of
from kway.jobs.threads import lacking
from kway.launch.blame import check_value
from kway.planned import device_type
from kway.planning.candidates import Candidate, Left, candidates, device_sets
from kway.planning.price import Scaling
from kway.records import Cluster
from kway.step.build import build
from kway.step.kinds import DEFAULT_KIND, kind_of
from kway.strategies.layout import AUTO, check_model, one_process
from kway.training.parts import training_parts
from kway.training.spec import positive
from kway.units import counted, shown


@dataclass(frozen=True)
class Asked:
    """What is to be planned. ``sets`` of devices, ``named`` by the user or all; ``strategies``, ``step_kinds``: those
    named, ``None`` for all. ``identity``: of the model, see ``identity_of``. ``notices``: lines for the user.
    """

    job: Job
    cluster: Cluster
    sets: list[list[str]]
    strategies: list[str] | None
    step_kinds: list[str] | None
    level: str
    shards: int
    scaling: Scaling
    refused: Callable[[Mapping[str, int], Sequence[str]], str]
    identity: Mapping[str, Any]
    named: bool = False
    notices: Sequence[str] = ()

    @property
    def device_types(self) -> list[str]:
        """The types of device among the sets, in their order."""
        return list(dict.fromkeys(device_type(devices[0]) for devices in self.sets))

    def counts(self, of: str) -> list[int]:
        """Return the numbers of devices of a type, smallest first."""
        return sorted({len(devices) for devices in self.sets if device_type(devices[0]) == of})

    def candidates(self, kinds: Callable[[str], Iterable[str]]) -> tuple[list[Candidate], list[Left]]:
        """Return all candidates with the step kinds that ``kinds`` names by type of device, and what is none."""
        return candidates(
            self.sets, kinds, self.threads, self.level, self.shards, self.strategies, self.refused
        )

    def threads(self, ranks: int, beside_gpu: bool) -> int:
        """Return how many CPU threads a rank of so many has on this machine."""
        return threads_for(ranks, beside_gpu=beside_gpu)


def asked_of(
    job: Job,
    devices: Any,
    strategy: Any,
    exactness: str,
    shards: int,
    step_kind: Any,
    batch_size_per_device: int | None = None,
    cluster: Cluster | None = None,
    is_here: bool = True,
    needing: Mapping[str, str] = MappingProxyType({}),
) -> Asked:
    """Return what is to be planned. Raises ``UsageError`` for what cannot be; nothing is started.

    ``is_here``: whether kway is to start the ranks, so that what cannot be sent to them is left to one process.
    ``needing``: options of the run for which ranks must be processes, with the reason of each.
    """
    cluster = discover() if cluster is None else cluster
    refuse_among_ranks("a plan", "their number is chosen already", "plan in one process")
    kinds = _names("step_kind", step_kind)
    for name in kinds or ():
        kind_of(name)
    sets = _sets(devices, cluster)
    if batch_size_per_device is not None:
        positive("batch_size_per_device", batch_size_per_device)
        job = replace(job, batch_size=batch_size_per_device)
    parts, _ = training_parts(replace(job, validation=None))
    model = build(job)
    batch, samples = parts.order.batch_size, parts.order.samples
    weak = batch_size_per_device is not None
    # As it is taken: a batch that is the same for all has no more samples than there are.
    scaling = Scaling(batch if weak or samples is None else min(batch, samples), weak, samples)
    most = batch * max(map(len, sets)) if weak else batch
    notices = (
        [f"the data has {counted(samples, 'sample')}, fewer than a batch of {most:,}: no step has more"]
        if samples is not None and samples < most
        else []
    )

    @cache
    def not_sent() -> str:
        try:
            # Of a model that is there already its init is no part: it has run.
            check_value("job", replace(job, init=None) if isinstance(job.model, nn.Module) else job)
        except UsageError as error:
            return str(error)
        return ""

    node_of = {f"cuda:{gpu['index']}": gpu.get("node", 0) for gpu in cluster.gpus}

    def refused(layout: Mapping[str, int], devices: Sequence[str]) -> str:
        if lack := lacking(one_process(layout), needing):
            return ": ".join(lack)
        if one_process(layout) and len({node_of.get(device, 0) for device in devices}) > 1:
            return "its ranks are threads of one process, and these devices are of several machines"
        if is_here and len(devices) > 1 and not one_process(layout) and not_sent():
            return not_sent()
        try:
            check_model(job, model, layout, exactness, scaling.of(len(devices)), shards)
        except RefusedError as error:
            return str(error)
        return ""

    asked = Asked(
        job,
        cluster,
        sets,
        _names("strategy", strategy),
        kinds,
        exactness,
        shards,
        scaling,
        refused,
        identity_of(model),
        devices != AUTO,
        notices,
    )
    # What cannot be is said before anything is timed.
    found, left = asked.candidates(lambda device: kinds or [DEFAULT_KIND])
    if not found:
        raise UsageError(f"no plan for {job.title}", left[0].why if left else "there is no layout")
    return asked


def _sets(devices: Any, cluster: Cluster) -> list[list[str]]:
    """Return device sets: all of a machine, those that a user names, or those that are sets already."""
    if isinstance(devices, list) and devices and all(isinstance(each, list) for each in devices):
        return devices
    spec = spelled(devices)
    return device_sets(cluster) if spec == AUTO else parse_list(spec, cluster)


def _names(what: str, given: Any) -> list[str] | None:
    """Return names from a list or a text with commas, ``None`` for ``auto``. Raises ``UsageError``."""
    if isinstance(given, str):
        given = [name.strip() for name in given.split(",") if name.strip()]
    if not isinstance(given, Sequence) or not given or not all(isinstance(name, str) for name in given):
        raise UsageError(f"{what}={shown(given)}", "it must be auto, or names in a list or by commas")
    return None if AUTO in given else list(dict.fromkeys(given))
