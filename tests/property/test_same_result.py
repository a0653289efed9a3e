"""What a step gives does not depend on the number of devices, for jobs that hypothesis draws.

The oracle is the proof's reference: plain torch on one device. The examples come first; then they travel to the
ranks in a few tasks, many at a time.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.internal.conjecture.providers import HypothesisProvider
from tests.property.draws import Draw, examples

from kway.data.parts import take_apart
from kway.jobs.judges import BitsJudge, Case, Judge, MathJudge
from kway.proving import candidate
from kway.step import losses as rules
from kway.step.build import build
from kway.world import World

DRAWS = 300
# Several times what it takes: a busy machine is no failure.
LIMIT_S = 300


@pytest.fixture(scope="module")
def draws() -> list[Draw]:
    """The examples, drawn once for all tests here: none changes them."""
    return drawn(DRAWS)


def drawn(count: int) -> list[Draw]:
    """Draw examples, no two alike: the same ones in every run, as hypothesis derives them from this function.

    Left alone, it would also draw numbers that it finds in the modules loaded so far, which tests before change.
    """
    found: dict[str, Draw] = {}
    nothing = SimpleNamespace(set_for_type=lambda kind: ())

    @settings(
        max_examples=2 * count, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(examples())
    def collect(example: Draw) -> None:
        found.setdefault(example.words, example)

    with mock.patch.object(HypothesisProvider, "_local_constants", nothing):
        collect()
    return list(found.values())[:count]


@dataclass
class Prepared:
    """An example whose reference has run. ``spec``: what its ranks run."""

    draw: Draw
    judge: Judge
    layout: dict[str, int]
    spec: candidate.CandidateSpec


def prepared(draw: Draw, scratch: Path) -> Prepared:
    """Run the reference of an example."""
    parts = take_apart(draw.job.data, batch_size=draw.job.batch_size, seed=draw.job.seed, shuffle=True)
    scratch.mkdir()
    case = Case(draw.job, parts, build(draw.job), draw.batches, scratch, torch.device("cpu"), draw.shards)
    layout = {"data": draw.ranks} if draw.ranks > 1 else {}
    if draw.level == "bits":
        judge: Judge = BitsJudge(case, lambda spec: candidate.run(World(), spec))
        return Prepared(draw, judge, layout, case.spec(layout, "bits", free=True))
    return Prepared(draw, MathJudge(case, draw.level), layout, case.spec(layout, draw.level))


def prepare(context: Any, draws: list[Draw], folder: Path) -> list[Prepared]:
    """Run the references of a part of the examples: each rank takes its turn, and is alone with its part."""
    world = context.world
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            prepared(draw, folder / f"{world.rank}-{place}")
            for place, draw in enumerate(draws[world.rank :: world.size])
        ]


@contextmanager
def counting_what_is_ignored() -> Iterator[None]:
    """Break kway: an ignored label weighs as much as any other."""

    def every_label(module: Any, target: torch.Tensor) -> torch.Tensor:
        return torch.tensor(float(target.numel()))

    with mock.patch.object(rules, "_class_weight", every_label):
        yield


def play(context: Any, specs: list[tuple[str, candidate.CandidateSpec]], broken: bool) -> list[Any]:
    """Run many candidates in one rank."""
    results = []
    with counting_what_is_ignored() if broken else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for words, spec in specs:
            try:
                results.append(candidate.run(context.world, spec))
            except Exception as error:
                error.add_note(f"in the example: {words}")
                raise
    return results


def rows(
    ranks: Any, draws: list[Draw], folder: Path, broken: bool = False
) -> list[tuple[Draw, dict[str, Any]]]:
    """Return the row of a proof for every example."""
    ready = [item for part in ranks.run(prepare, draws, folder, size=2, limit=LIMIT_S) for item in part]
    judged = []
    for size in sorted({draw.ranks for draw in draws}):
        group = [item for item in ready if item.draw.ranks == size]
        specs = [(item.draw.words, item.spec) for item in group]
        results = ranks.run(play, specs, broken, size=size, limit=LIMIT_S)[0]
        for item, result in zip(group, results, strict=True):
            judged.append((item.draw, item.judge.compare(item.layout, lambda _, result=result: result)))
    return judged


@pytest.mark.timeout(2 * LIMIT_S)
def test_any_job_on_any_number_of_ranks(ranks, draws, tmp_path):
    counts = {
        "drawn": len(draws),
        "several ranks": sum(draw.ranks > 1 for draw in draws),
        "uneven": sum(draw.uneven for draw in draws),
        "an empty share": sum(draw.empty_share for draw in draws),
        "micro-batches": sum(draw.job.micro_batch is not None for draw in draws),
        **{level: sum(draw.level == level for draw in draws) for level in ("math", "bits", "loose")},
    }
    print(counts)
    least = {"several ranks": 180, "uneven": 60, "an empty share": 30, "micro-batches": 30,
             "math": 90, "bits": 48, "loose": 18}  # fmt: skip
    assert counts["drawn"] == DRAWS
    assert all(counts[what] >= number for what, number in least.items()), counts
    failed = [
        f"{draw.words}: {row['equal']}, {row['reason']}"
        for draw, row in rows(ranks, draws, tmp_path)
        if row["equal"] not in (("bits",) if draw.level == "bits" else ("bits", "ulps"))
    ]
    print(*failed, sep="\n")
    # The one with the fewest words to it is the easiest to look into.
    assert not failed, f"{len(failed)} of {DRAWS}; {min(failed, key=len)}"


def ignores(draw: Draw) -> bool:
    """Whether a label of the first batch, which holds all samples, is ignored and the loss is a mean over the rest."""
    found = re.search(r" mean .*ignoring (-?\d+)", draw.words)
    labels = draw.job.data["label"] if isinstance(draw.job.data, dict) else draw.job.data[-1]
    return found is not None and bool((labels == int(found[1])).any())


def test_a_wrong_weight_is_found(ranks, draws, tmp_path):
    draws = [draw for draw in draws if draw.level == "math" and ignores(draw)][:20]
    found = [row["equal"] for _, row in rows(ranks, draws, tmp_path, broken=True)]
    assert found == ["no"] * len(draws)
    assert len(draws) > 5
