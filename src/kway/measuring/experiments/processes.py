"""When processes pay: tasks over lists in a pool and in new processes, and samples from loader workers."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing import forkserver

from kway.data.fork_server import Context
from kway.measuring.bench import Bench, Row
from kway.measuring.budget import Seconds
from kway.measuring.by_processes import BEGIN, EACH, POOL, SERIAL, Processes
from kway.measuring.experiment import Experiment
from kway.measuring.figure import Figure
from kway.measuring.fit import crossing, knee
from kway.measuring.loading import BATCH, BATCHES, counts, work
from kway.measuring.tasks import TASKS, end_with_parent
from kway.measuring.work import Call, waited
from kway.units import counted

START, LOADER = "start, until it answers or ends", "samples from loader workers"


def run(bench: Bench) -> list[Figure]:
    """Measure tasks of both kinds, what processes take to start, and loader workers."""
    figures: list[Figure] = []
    with ExitStack() as opened:
        count = max(2, bench.cpu_ranks)
        processes = Processes(Context.preloaded(), count, opened)
        bench.notes.append(f"tasks: {POOL} and {EACH} work on {count} parts of a list at a time")
        processes.start_one()  # the first one waits until the fork server is there
        for kind in TASKS:
            rows = _tasks(processes, kind, bench.sizes["elements"], bench.sizes["elements_each"])
            measured = bench.measure(rows, "cpu", 0.32)
            figures += measured + paying(bench, kind, measured)
        figures += bench.measure(_starts(processes), "cpu", 0.1)
    with ExitStack() as opened:
        loaders = [
            Row(
                LOADER,
                {"workers": workers},
                work(workers, opened),
                "samples/s",
                lambda seconds: BATCH * BATCHES / seconds,
            )
            for workers in counts(bench.cpu_ranks)
        ]
        figures += bench.measure(loaders, "cpu", 0.26)
    return figures + marked(bench, figures)


def start(bench: Bench) -> Call:
    """Start the fork server, which imports torch."""
    context = Context.preloaded()
    forkserver.ensure_running()

    def wait() -> None:
        first = context.Process(target=end_with_parent, daemon=True)
        first.start()
        first.join()

    return wait


def title(kind: str) -> str:
    """Name the figures of a kind of task."""
    return f"{kind} tasks"


def _tasks(processes: Processes, kind: str, sizes: Sequence[int], each: Sequence[int]) -> list[Row]:
    # New processes last: where they start slowly, they are what there is no room for.
    cells = [(way, elements) for elements in sizes for way in (SERIAL, POOL)]
    return [
        Row(
            title(kind),
            {"way": way, "elements": elements},
            processes.work(way, kind, elements),
            family=way,
            work=float(BEGIN[way] + elements),
        )
        for way, elements in (*cells, *((EACH, elements) for elements in each))
    ]


def _starts(processes: Processes) -> list[Row]:
    calls = {"one process": processes.start_one, f"a pool of {processes.count}": processes.start_pool}
    return [Row(START, {"of": name}, waited(call, partial(int))) for name, call in calls.items()]


def paying(bench: Bench, kind: str, figures: Sequence[Figure]) -> list[Figure]:
    """Return from how many elements on each way takes less time than one process does."""
    times: dict[str, dict[int, float]] = {}
    for figure in figures:
        times.setdefault(figure.parameters["way"], {})[figure.parameters["elements"]] = figure.value
    marks = []
    for way in (POOL, EACH):
        sizes = sorted(times.get(SERIAL, {}).keys() & times.get(way, {}).keys())
        if not sizes:
            continue  # there was no room for any
        at = crossing(sizes, [times[SERIAL][size] for size in sizes], [times[way][size] for size in sizes])
        if at is None:
            bench.notes.append(
                f"{title(kind)}: {way} takes no less time than one process up to {max(sizes):,} elements"
            )
            continue
        parameters = {"marks": title(kind), "way": way}
        marks.append(bench.maker().computed(f"{title(kind)}: crossing", parameters, "elements", at))
    return marks


def marked(bench: Bench, figures: Sequence[Figure]) -> list[Figure]:
    """Return the knee: the fewest workers that deliver nearly as much as any number of them does."""
    rates = {figure.parameters["workers"]: figure.value for figure in figures if figure.name == LOADER}
    if len(rates) < 2:
        return []
    at = knee(list(rates), list(rates.values()))
    best = max(rates, key=lambda workers: rates[workers])
    bench.notes.append(f"{LOADER}: {compared(at, best, rates)}")
    said = "knee"
    parameters = {"marks": LOADER, "at": said}
    return [bench.maker().computed(f"{LOADER}: {said}", parameters, "workers", at, notes=(said,))]


def compared(at: int, best: int, rates: Mapping[int, float]) -> str:
    """Say how fast the knee is beside the number of workers that is fastest, which it may be itself.

    ``rates``: samples a second by number of workers; 0 of them: the loop reads by itself.
    """
    tried = f"({', '.join(map(str, rates))} were tried)"
    if at == best:
        return f"with {counted(at, 'worker')} the most samples a second are read {tried}"
    part = f"{rates[at] / rates[best]:.0%}"
    return f"with {counted(at, 'worker')} {part} as many samples a second are read as with {best}, the most {tried}"


DECADES = (10, 32, 100, 320, 1000, 3200, 10_000, 32_000, 100_000, 320_000, 1_000_000)
EXPERIMENT = Experiment(
    name="processes",
    summary="serial, pool, one process a task, compute-bound and I/O-bound; loader workers",
    run=run,
    quick={"elements": (10, 1000, 10_000, 100_000), "elements_each": (10, 100_000)},
    full={"elements": DECADES, "elements_each": DECADES},
    quick_s=Seconds(8.0, cpu=6.0),
    full_s=Seconds(120.0, cpu=120.0),
    start=start,
    order=60,
)
