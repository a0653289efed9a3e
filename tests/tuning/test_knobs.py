"""What is tried, and in which order."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from kway.errors import UsageError
from kway.step.pieces import cuts_code, piece_bytes
from kway.step.settings import Settings, takes_form
from kway.tuning.knobs import NAMES, Subject, check_choice, stages, untried


def names(subject):
    return [stage.name for stage in stages(subject)]


def changes(subject):
    return [dict(change) for stage in stages(subject) for change in stage.changes]


def test_a_network_of_images_on_a_gpu_is_tried_whole_first_and_then_piece_by_piece():
    subject = Subject("cuda", images=True, forms=("foreach", "fused"))
    assert names(subject) == ["step kind", "memory format", "convolutions", "optimizer", "compile mode"]
    assert changes(subject)[0] == {
        "step_kind": "compiled-graph",
        "optimizer": "fused",
        "memory_format": "channels_last",
    }


def test_what_several_ranks_add_is_the_reduction():
    one, two = (Subject("cuda", ranks=ranks, gradient_bytes=10**9) for ranks in (1, 2))
    assert set(names(two)) - set(names(one)) == {"overlap", "buckets"}
    small = Subject("cuda", ranks=2, gradient_bytes=10**6)
    assert "buckets" not in names(small)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("level", ["math", "loose", "bits"])
def test_not_to_cut_code_is_tried_where_it_is_cut(device, ranks, level):
    kind, net = "compiled", nn.Linear(3_000, 3_000, bias=False)
    cut = piece_bytes(Settings(), torch.device(device), kind, net, ranks, level) is not None
    subject = Subject(device, ranks, level, step_kind=kind, gradient_bytes=net.weight.nbytes)
    assert ("overlap" in names(subject)) == cut
    assert (
        cuts_code(True, device, ranks, level)
        == cut
        == ((device, ranks, level != "bits") == ("cuda", 2, True))
    )


def test_bits_try_nothing_that_depends_on_the_moment_or_on_the_number_of_ranks():
    subject = Subject("cuda", ranks=2, level="bits", images=True, forms=("fused",), gradient_bytes=10**9)
    assert not {"convolutions", "overlap", "buckets"} & {*names(subject)}
    assert "threads" not in names(Subject("cpu", threads=4, level="bits"))


def test_a_named_kind_stays_and_a_missing_compiler_is_not_asked():
    assert all(
        change.get("step_kind", "graph") == "graph" for change in changes(Subject("cuda", step_kind="graph"))
    )
    kinds = {change.get("step_kind") for change in changes(Subject("cuda", compiler=False, forms=("fused",)))}
    assert kinds <= {"graph", None}
    assert "step kind" not in names(Subject("cpu", compiler=False))


def test_precisions_only_where_they_are_allowed_and_attention_only_where_there_is_a_kernel():
    assert not [change for change in changes(Subject("cuda")) if "precision" in change]
    allowed = Subject("cuda", allowed=("tf32", "bf16"), attention=True)
    assert changes(allowed)[:2] == [{"precision": "tf32"}, {"precision": "bf16"}]
    assert "attention" in names(allowed)
    assert "attention" not in names(Subject("cuda", attention=True))


def test_workers_only_where_input_is_waited_for():
    assert "input" not in names(Subject("cpu", workers=0, waits=0.01))
    waiting = Subject("cpu", workers=2, waits=0.5)
    assert [change for change in changes(waiting) if "workers" in change] == [{"workers": 4}, {"workers": 8}]


def test_why_no_workers_are_tried_is_said():
    assert "workers (a step hardly waits for input)" in untried(Subject("cpu", workers=0, waits=0.01))
    assert "workers (the data is in memory)" in untried(Subject("cpu", no_workers="the data is in memory"))


def test_input_that_is_waited_for_comes_first_and_what_is_compiled_after_what_is_cheap():
    cpu = Subject("cpu", workers=0, waits=0.5, threads=4, micro_batch=64, may_be_cut=True, allowed=("bf16",))
    assert names(cpu) == ["input", "precision", "threads", "micro-batch", "step kind"]
    assert names(replace(cpu, device="cuda", threads=1))[0] == "input"


def test_what_the_user_has_chosen_is_left():
    subject = Subject(
        "cpu", images=True, forms=("fused",), threads=4, named=frozenset({"memory_format", "threads"})
    )
    assert {name for change in changes(subject) for name in change} == {"optimizer", "step_kind"}


def test_all_that_is_tried_can_be_chosen():
    for device in ("cpu", "cuda"):
        subject = Subject(
            device, 2, threads=4, allowed=("bf16",), images=True, attention=True, forms=("fused", "foreach"),
            gradient_bytes=10**9, waits=1.0, workers=1, micro_batch=64, may_be_cut=True,
        )  # fmt: skip
        for change in changes(subject):
            check_choice(change)
        assert {name for change in changes(subject) for name in change} <= NAMES


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"optimiser": "fused"}, "did you mean 'optimizer'"),
        ({"optimizer": "quick"}, "fused"),
        ({"step_kind": "fast"}, "eager"),
        ({"micro_batch": -1}, "at least 1"),
        ({"bucket_mib": 0}, "greater than 0"),
        ({"threads": 1.5}, "from 1 to"),
        ({"threads": 10**12}, "from 1 to"),
        ({"bucket_mib": float("inf")}, "below"),
        ({"autotune": 1}, "true"),
        ({"autotune": "yes"}, "true"),
    ],
)
def test_a_choice_that_cannot_be_is_one_error(choice, said):
    with pytest.raises(UsageError, match=said):
        check_choice(choice)


def test_settings_say_what_is_chosen_and_nothing_else():
    assert Settings.of({"optimizer": "fused", "overlap": False}).named() == {
        "optimizer": "fused",
        "overlap": False,
    }
    assert Settings().named() == {}


@pytest.mark.parametrize(
    ("given", "open_"), [({}, True), ({"fused": False}, False), ({"foreach": False}, False)]
)
def test_an_optimizer_whose_maker_has_chosen_its_form_is_left(given, open_):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, **given)
    assert [takes_form(optimizer, form) for form in ("foreach", "fused")] == [open_, open_]


def test_what_is_no_candidate_is_said_with_the_reason():
    here = Subject("cpu", micro_batch=16, may_be_cut=True, images=True, forms=("fused",))
    said = untried(here)
    assert "threads (a rank has 1)" in said
    assert "micro_batch (16 samples at once)" in said
    assert not any(name in said for name in ("memory_format", "optimizer", "step_kind"))
    assert "step_kind (named)" in untried(replace(here, step_kind="eager"))
    assert "threads (fixed at level bits)" in untried(replace(here, threads=4, level="bits"))
    assert "threads" not in untried(replace(here, threads=4))
