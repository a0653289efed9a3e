"""What torch may compute with fewer bits, however a user said so: one way of torch refuses to read the other."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.measuring.products import with_tf32
from kway.step.precision import precision_of
from kway.step.process_wide import held
from kway.step.tf32 import _places, _state, kept, tf32

B = torch.backends


def _for(place, value):
    return lambda: setattr(place, "fp32_precision", value)


SAID = {
    "nothing": lambda: None,
    "products": _for(B.cuda.matmul, "tf32"),
    "all tf32": _for(B, "tf32"),
    "all ieee": _for(B, "ieee"),
    "convolutions": _for(B.cudnn.conv, "ieee"),
    "high": partial(torch.set_float32_matmul_precision, "high"),
    "medium": partial(torch.set_float32_matmul_precision, "medium"),
    "allow_tf32": lambda: setattr(B.cuda.matmul, "allow_tf32", True),
}


def same(before, after):
    """What torch refused to tell before, the older way beside the newer one, nobody reads."""
    return all(old == new for old, new in zip(before, after, strict=True) if old is not None)


@pytest.fixture
def as_before():
    """What a user says is taken back, for all back ends as well. Before, every place follows what is said of all."""
    put_back, of_all = kept(), B.fp32_precision
    for place in _places():
        place.fp32_precision = "none"
    yield
    B.fp32_precision = of_all
    put_back()


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("say", SAID.values(), ids=SAID)
@pytest.mark.parametrize("allowed", [True, False])
def test_only_what_is_allowed_is_so_and_what_was_said_holds_again(say, allowed):
    say()
    before = _state()
    with tf32(allowed):
        own = [place.fp32_precision for place in _places()]
        if allowed:
            assert own[:3] == ["tf32"] * 3
        else:
            assert {*own} <= {"ieee", "none"}
        # What torch's compiler reads.
        assert (B.cuda.matmul.allow_tf32, B.cudnn.allow_tf32) == (allowed, allowed)
    assert same(before, _state())


def told_of(values):
    """Return what each place tells where a value is said of all back ends; nothing is said of all afterwards."""
    found = []
    for value in (*values, "none"):
        B.fp32_precision = value
        found.append([place.fp32_precision for place in _places()])
    return found


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("of_all", ["tf32", "ieee", "none"])
@pytest.mark.parametrize("allowed", [[False], [True], [True, True], [False, True]])
def test_what_is_said_of_all_back_ends_later_holds_in_every_place(of_all, allowed):
    B.fp32_precision = of_all
    for each in allowed:
        with tf32(each), tf32(not each):
            pass
    assert told_of(["ieee", "tf32"]) == [[value] * 6 for value in ("ieee", "tf32", "none")]


@pytest.mark.usefixtures("as_before")
def test_a_place_of_its_own_stays_so_where_all_back_ends_are_said_later():
    B.fp32_precision, B.cudnn.conv.fp32_precision = "tf32", "ieee"
    with tf32(True):
        pass
    assert [row[1] for row in told_of(["ieee", "tf32"])] == ["ieee"] * 3


# What torch begins with cannot be had again: it takes a process of its own.
FRESH = """
from functools import partial
import torch, kway
from kway.step.tf32 import _places, kept, tf32

class Looks(torch.nn.Linear):
    def forward(self, x):
        seen.append([place.fp32_precision for place in _places()[3:]])
        return super().forward(x)

seen, put_back = [], kept()
job = kway.Job(
    partial(Looks, 2, 2), torch.nn.MSELoss(), partial(torch.optim.SGD, lr=0.1), (torch.ones(8, 2), torch.ones(8, 2)),
    batch_size=4,
)
torch.backends.mkldnn.fp32_precision = "tf32"
kway.train(job, devices="cpu:1", epochs=1, echo=False, tune=False)
assert seen == [["ieee"] * 3] * 2, seen
with tf32(True):
    pass
torch.backends.mkldnn.fp32_precision = "none"
put_back()
for value in ("ieee", "tf32"):
    torch.backends.fp32_precision = value
    print(*(place.fp32_precision for place in _places()))
torch.backends.fp32_precision = "none"
print(*(place.fp32_precision for place in _places()[1:3]))
"""


@pytest.mark.starts
def test_a_run_on_a_cpu_leaves_torch_as_it_began(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FRESH], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines()[-3:] == [" ".join(["ieee"] * 6), " ".join(["tf32"] * 6), "tf32 tf32"], (
        done
    )


@pytest.mark.usefixtures("as_before")
def test_what_is_so_already_is_not_written():
    with tf32(False):
        assert B.cuda.matmul.fp32_precision == "none"


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("allowed", [True, False])
def test_of_convolutions_on_gpus_nothing_is_written_for_a_cpu(allowed):
    # Torch's older way, which is what would be written, sets the newer one of both places.
    B.cudnn.allow_tf32 = not allowed
    before = B.cudnn.conv.fp32_precision, B.cudnn.rnn.fp32_precision
    with tf32(allowed, torch.device("cpu")):
        assert (B.cudnn.conv.fp32_precision, B.cudnn.rnn.fp32_precision) == before
    with tf32(allowed, torch.device("cuda")):
        assert (B.cudnn.conv.fp32_precision, B.cudnn.rnn.fp32_precision) != before


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("said", ["products", "all tf32", "all ieee"])
def test_a_run_a_measurement_and_turns_of_threads_go_on_under_either_way(said):
    SAID[said]()
    before = _state()
    job = kway.Job(
        model=partial(nn.Linear, 2, 2), loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(torch.ones(8, 2), torch.ones(8, 2)), batch_size=4,
    )  # fmt: skip
    assert kway.train(job, devices="cpu:1", epochs=1, echo=False).record.steps == 2
    assert kway.train(job, devices="cpu:2", strategy="threads", epochs=1, echo=False).record.steps == 2
    assert with_tf32(False, lambda count: 2.0 * count)(3) == 6.0
    with precision_of("tf32").flags():
        assert B.cudnn.conv.fp32_precision == "tf32"
    put_back = held()
    put_back()
    assert same(before, _state())
