"""An optimizer's state goes by names: another order, other groups and other parameters are noticed or harmless."""

import pytest
import torch
from tests.pairwise import pairwise
from torch import nn

from kway.checkpoints.optimizer import load_by_name, state_by_name
from kway.checkpoints.reading import open_checkpoint
from kway.checkpoints.saving import write_checkpoint
from kway.checkpoints.snapshot import Snapshot, freeze
from kway.errors import UsageError


def pair():
    """a and b of one shape, with gradients 1 and 5."""
    named = {"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2))}
    named["a"].grad, named["b"].grad = torch.ones(2), torch.full((2,), 5.0)
    return named


def sgd(*groups, **options):
    return torch.optim.SGD(
        [{"params": list(group), **more} for group, more in groups], lr=0.1, momentum=0.9, **options
    )


def saved(named, optimizer, tmp_path):
    """The state as it comes back from disk."""
    parts = {"optimizer": state_by_name(optimizer, named.items())}
    path = write_checkpoint(tmp_path / "c", freeze(Snapshot(1, 0, named, parts), {}))
    return open_checkpoint(path).part("optimizer")


def momenta(named, optimizer):
    return {name: optimizer.state[p]["momentum_buffer"].tolist() for name, p in named.items()}


RIGHT = {"a": [1.0, 1.0], "b": [5.0, 5.0]}


def test_k03_momentum_follows_the_name_when_parameters_are_listed_in_another_order(tmp_path):
    named = pair()
    optimizer = sgd((named.values(), {}))
    optimizer.step()
    state = saved(named, optimizer, tmp_path)
    other = pair()
    turned = sgd(((other["b"], other["a"]), {}))
    load_by_name(turned, other.items(), state)
    assert momenta(other, turned) == RIGHT


def test_k03_also_where_groups_are_swapped_and_their_options_follow(tmp_path):
    named = pair()
    optimizer = sgd(((named["a"],), {"weight_decay": 0.5}), ((named["b"],), {"weight_decay": 0.0, "lr": 0.3}))
    optimizer.step()
    state = saved(named, optimizer, tmp_path)
    other = pair()
    swapped = sgd(((other["b"],), {}), ((other["a"],), {}))
    load_by_name(swapped, other.items(), state)
    assert momenta(other, swapped) == RIGHT
    assert [(g["weight_decay"], g["lr"]) for g in swapped.param_groups] == [(0.0, 0.3), (0.5, 0.1)]
    assert [g["params"][0] is other[n] for g, n in zip(swapped.param_groups, "ba", strict=True)] == [
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda n: sgd(((n["a"],), {})), "the job does not optimize b"),
        (lambda n: sgd(((n["a"], n["b"], n["c"]), {})), "it has nothing for c"),
        (lambda n: sgd(((n["a"],), {}), ((n["c"],), {})), "does not optimize b; it has nothing for c"),
        (
            lambda n: sgd(((n["a"],), {}), ((n["b"],), {})),
            r"its groups are \(a, b\), the job's \(a\) and \(b\)",
        ),
        (lambda n: torch.optim.Adam([n["a"], n["b"]]), "it is of SGD, the job has Adam"),
    ],
)
def test_k03_what_does_not_fit_is_listed_and_nothing_is_loaded(change, says):
    named = pair()
    optimizer = sgd((named.values(), {}))
    optimizer.step()
    state = state_by_name(optimizer, named.items())
    other = {**pair(), "c": nn.Parameter(torch.zeros(2))}
    changed = change(other)
    with pytest.raises(UsageError, match=rf"does not fit: .*{says}"):
        load_by_name(changed, other.items(), state)
    assert not changed.state


def test_k03_loaded_state_shares_no_memory_with_its_source():
    named = pair()
    optimizer = sgd((named.values(), {}))
    optimizer.step()
    state = state_by_name(optimizer, named.items())
    other = pair()
    second = sgd((other.values(), {}))
    load_by_name(second, other.items(), state)
    second.step()
    assert momenta(named, optimizer) == RIGHT
    assert momenta(other, second)["b"] == [9.5, 9.5]


def test_a_parameter_without_a_name_is_an_error():
    named, stray = pair(), nn.Parameter(torch.ones(3))
    with pytest.raises(
        UsageError, match=r"parameter 1 of the optimizer's group 0 \(shape \(3,\)\): its state is sav"
    ):
        state_by_name(sgd(((named["a"], stray), {})), named.items())


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def steps(net, optimizer, first, last):
    for step in range(first, last):
        optimizer.zero_grad()
        net(torch.full((3, 4), float(step), dtype=torch.float64)).square().mean().backward()
        optimizer.step()


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.AdamW(p, amsgrad=True), lambda p: torch.optim.Adam(p, capturable=False, foreach=True),
    lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)), torch.optim.RMSprop, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop, torch.optim.ASGD,
    lambda p: torch.optim.AdamW(p, fused=True),
]  # fmt: skip


@pytest.mark.parametrize(("make", "named_groups", "at"), pairwise(OPTIMIZERS, [False, True], [0, 3]))
def test_a_run_that_goes_on_from_disk_has_the_bits_of_one_that_never_stopped(
    make, named_groups, at, tmp_path
):
    def open_(net):
        return make(net.named_parameters() if named_groups else net.parameters())

    whole = model()
    optimizer = open_(whole)
    steps(whole, optimizer, 0, 6)

    first = model()
    before = open_(first)
    steps(first, before, 0, at)
    state = state_by_name(before, first.named_parameters())
    path = write_checkpoint(
        tmp_path / "c", freeze(Snapshot(at, 0, first.state_dict(), {"optimizer": state}), {})
    )
    read = open_checkpoint(path)
    second = model()
    second.load_state_dict(read.weights())
    after = open_(second)
    load_by_name(after, second.named_parameters(), read.part("optimizer"))
    steps(second, after, at, 6)
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    if named_groups:
        assert after.param_groups[0]["param_names"] == [name for name, _ in second.named_parameters()]


def test_asking_for_the_state_takes_no_step_and_makes_none():
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    assert state_by_name(optimizer, net.named_parameters())["entries"] == {}
    assert not optimizer.state


def test_entries_keep_their_dtype_beside_weights_of_fewer_bits():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    fine = torch.tensor([1.0, 1.0 + 2**-20, 3.0])
    optimizer.state[weight]["momentum_buffer"] = fine
    state = state_by_name(optimizer, [("w", weight)])
    second = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    load_by_name(second, [("w", weight)], state)
    held = second.state[weight]["momentum_buffer"]
    assert held.dtype == torch.float32
    assert torch.equal(held, fine)
    assert held.data_ptr() != fine.data_ptr()


def test_options_that_the_checkpoint_lacks_stay():
    named = pair()
    optimizer = sgd((named.values(), {}))
    state = state_by_name(optimizer, named.items())
    del state["groups"][0]["nesterov"]
    other = pair()
    second = sgd((other.values(), {}), nesterov=True)
    load_by_name(second, other.items(), state)
    assert second.param_groups[0]["nesterov"] is True
