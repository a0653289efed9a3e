import math

import pytest
import torch

from kway.comm.group import Group
from kway.errors import UsageError
from kway.step.tally import Tally, accuracy, mean, measure, right_ones

CPU = torch.device("cpu")


def test_sums_and_weights_add_in_float64():
    tally = Tally(["a", "b"], CPU)
    for value in (1e8, 1.0, 1e-8):
        tally.add("b", torch.tensor(value, dtype=torch.float64), torch.tensor(1))
    assert tally.result(Group()) == {"a": (0.0, 0.0), "b": (1e8 + 1.0 + 1e-8, 3.0)}


def test_a_mean_of_nothing_is_no_number():
    assert mean((6.0, 4.0)) == 1.5
    assert math.isnan(mean((0.0, 0.0)))


def measured(metric, samples=4):
    tally = Tally(["m"], CPU)
    measure({"m": metric}, torch.arange(4.0), torch.arange(4.0) * 2, samples, tally)
    return tally.result(Group())["m"]


def test_what_a_metric_may_return():
    assert measured(lambda output, target: target) == (12.0, 4.0)
    assert measured(lambda output, target: target.view(2, 2)) == (12.0, 4.0)
    assert measured(lambda output, target: (target.sum(), 3)) == (12.0, 3.0)
    assert measured(lambda output, target: target.mean()) == (12.0, 4.0)
    assert measured(lambda output, target: 0.5) == (2.0, 4.0)
    assert measured(lambda output, target: output > 0) == (3.0, 4.0)
    for wrong in ("text", None, (1, 2, 3)):
        with pytest.raises(UsageError, match="'m' returned a"):
            measured(lambda output, target, wrong=wrong: wrong)
    with pytest.raises(UsageError, match="single numbers"):
        measured(lambda output, target: (target, torch.ones(4)))


def several(*parts, metrics=("m",), rows=1):
    """What metrics give that return ``parts[i]``, one share after another."""
    tally = Tally(list(metrics), CPU, rows)
    for row, values in enumerate(parts):
        table = {name: lambda output, target, value=value: value for name, value in values.items()}
        measure(table, None, None, 4, tally, row % rows)
    return tally.result(Group())


def test_a_metric_may_return_several_figures_with_weights_of_their_own():
    first = {"m": {"values": torch.arange(3.0), "pair": (6.0, 2), "number": 0.5}}
    second = {"m": {"number": 1, "late": torch.tensor(True)}}
    found = several(first, second)
    assert found == {"late": (4.0, 4.0), "number": (6.0, 8.0), "pair": (6.0, 2.0), "values": (3.0, 3.0)}
    assert list(found) == sorted(found)  # whatever came first: the same on all ranks


def test_names_that_were_asked_for_come_first_and_stay_where_nothing_was_added():
    found = several({"z": 1.0, "m": {"a": 2.0}}, {"z": 1.0, "m": {}}, metrics=("z", "m", "none"))
    assert found == {"z": (8.0, 8.0), "none": (0.0, 0.0), "a": (8.0, 4.0)}
    assert list(found) == ["z", "none", "a"]
    assert several({"m": {}}) == {}
    assert several({"m": {"m": 2.0}}) == {"m": (8.0, 4.0)}
    assert several({"m": {"k": 2.0}}, {"m": 1.0}) == {"m": (4.0, 4.0), "k": (8.0, 4.0)}


@pytest.mark.parametrize(
    ("key", "said"),
    [("lr", "meaning"), ("loss", "meaning"), ("train_x", "meaning"), (3, "a text"), ("", "a text")],
)
def test_a_key_that_the_record_cannot_hold(key, said):
    with pytest.raises(UsageError, match=said) as caught:
        several({"m": {key: 1.0}})
    assert f"a key {key!r} of metric 'm'" in str(caught.value)


def test_what_a_key_may_not_hold():
    for wrong in ({"deeper": 1.0}, "text", None):
        with pytest.raises(UsageError, match="for 'k', a "):
            several({"m": {"k": wrong}})


def test_two_metrics_do_not_add_up_under_one_name():
    for first, second in (({"k": 1.0}, {"k": 2.0}), (1.0, {"m": 1.0}), ({"other": 1.0}, 1.0)):
        with pytest.raises(UsageError, match="both return"):
            several({"m": first, "other": second}, metrics=("m", "other"))


def test_every_share_has_a_row_whatever_names_it_has():
    parts = [{"m": {"a": (0.1, 1)}}, {"m": {"b": (0.2, 1)}}, {"m": {"a": (0.3, 1)}}, {"m": {"a": (1e9, 1)}}]
    assert several(*parts, rows=2)["a"] == (0.1 + 0.3 + 1e9, 3.0)
    assert several(*parts, rows=4)["a"] == ((0.1 + 0.3) + 1e9, 3.0)
    assert several(*parts, rows=4)["b"] == (0.2, 1.0)


def test_accuracy_of_classes_and_probabilities_and_pixels():
    output = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(output, torch.tensor([1, 1, 1])).tolist() == [1.0, 0.0, 1.0]
    assert accuracy(output, torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])).tolist() == [1.0, 1.0, 0.0]
    pixels = torch.zeros(2, 3, 2, 2)
    pixels[:, 1] = 1.0
    assert accuracy(pixels, torch.ones(2, 2, 2)[:].long()).shape == (2, 2, 2)


def own_names(context):
    tally, rank = Tally(["m"], CPU, 3), context.world.rank
    keys = [{"x": 1.0, "y": 2.0}, {}, {"y": 5.0, "x": (3.0, 2)}][rank]
    if rank != 1:
        measure({"m": lambda output, target: keys}, None, None, rank + 1, tally, rank)
    return list(tally.result(Group(rank, context.world.size)).items())


def test_ranks_add_by_name_whatever_their_keys_and_their_order(ranks):
    assert ranks.run(own_names, size=3) == [[("x", (4.0, 3.0)), ("y", (17.0, 4.0))]] * 3


def own_owner(context):
    tally, rank = Tally(["m", "n"], CPU), context.world.rank
    measure({"mn"[rank]: lambda output, target: {"k": 1.0}}, None, None, 1, tally)
    try:
        tally.result(Group(rank, context.world.size))
    except UsageError as error:
        return str(error)


def test_one_name_of_two_metrics_is_an_error_on_all_ranks(ranks):
    first, second = ranks.run(own_owner, size=2)
    assert first == second
    assert "'m' and 'n' both return 'k'" in first


def own_numbers(context):
    tally = Tally(["a", "b"], CPU)
    tally.add("b", torch.tensor(float(context.world.rank + 1)), torch.tensor(2.0 * context.world.rank))
    return tally.result(Group(context.world.rank, context.world.size))


def test_ranks_add_by_name(ranks):
    assert ranks.run(own_numbers, size=3) == [{"a": (0.0, 0.0), "b": (6.0, 6.0)}] * 3


def test_one_value_for_several_samples_is_a_doubt_that_is_said_once():
    doubts = []
    tally = Tally(["kept"], torch.device("cpu"), doubts=doubts)
    for samples in (4, 3, 1, 4, 4, 3, 4):
        measure({"kept": lambda output, target: torch.ones(1)}, None, None, samples, tally)
    assert len(doubts) == 1
    assert "metric 'kept' returned one value of shape (1,) for several samples" in doubts[0]
    assert tally.result(Group()) == {"kept": (7.0, 7.0)}
    tally = Tally(["kept"], torch.device("cpu"), doubts=(others := []))
    for _ in range(9):
        measure({"kept": lambda output, target: torch.tensor(0.5)}, None, None, 4, tally)
        measure({"other": lambda output, target: torch.ones(3)}, None, None, 4, tally)
        measure({"pair": lambda output, target: (1.0, 1.0)}, None, None, 4, tally)
    assert others == []


def by_class(output, target):
    return {f"right_{c}": (output == target)[target == c].double() for c in target.unique().tolist()}


def of_the_first(output, target):
    return (output == target)[target == 0].double()


def mean_by_class(output, target):
    return {f"mean_{c}": (output == target).double().mean().view(1) for c in range(2)}


@pytest.mark.parametrize(
    ("metric", "shares", "doubted"),
    [
        # Each class has one sample in each share: the parts are the whole.
        (by_class, [[0, 1, 2]] * 9, 0),
        # One, and nobody knows of how many classes: there is one now and then.
        (by_class, [[0, 1, 1], [0, 2, 2], [1, 2, 2], [0, 0, 1], [0, 1, 2]], 0),
        (of_the_first, [[0, 1, 1], [0, 2, 2], [0, 1, 2], [0, 0, 1]], 0),
        (of_the_first, [[0, 1, 1]] * 3 + [[1, 1, 1]] + [[0, 1, 1]] * 9, 0),
        # What was a doubt is none any more.
        (of_the_first, [[0, 1, 1]] * 6 + [[0, 0, 1]], 0),
        (of_the_first, [[0, 1, 1]] * 6, 1),
        (mean_by_class, [[0, 1, 1]] * 4, 2),
        # The last batch has as many samples as there are figures.
        (mean_by_class, [[0, 1], [0, 1, 1], [0, 1, 1], [0, 1], [0, 1, 1], [0, 1, 1]], 2),
        (mean_by_class, [[0]] * 9, 0),
    ],
)
def test_values_of_chosen_samples_are_no_mean(metric, shares, doubted):
    doubts = []
    tally = Tally(["m"], CPU, doubts=doubts)
    for share in map(torch.tensor, shares):
        measure({"m": metric}, share, share, len(share), tally)
    assert len(doubts) == doubted
    assert all("one value of shape (1,) for several samples" in line for line in doubts)


@pytest.mark.parametrize("shape", [(13, 5), (6, 5, 4), (1, 5)])
@pytest.mark.parametrize("classes", [True, False])
def test_accuracy_is_counted_the_same_in_whatever_way_it_is_summed(shape, classes):
    draw = torch.Generator().manual_seed(0)
    output = torch.randn(shape, generator=draw)
    target = torch.randn(shape, generator=draw).argmax(1) if classes else torch.rand(shape, generator=draw)
    found = []
    for right in (None, right_ones):
        tally = Tally(["accuracy"], torch.device("cpu"), rows=2)
        for row in (1, 0, 1):
            measure({"accuracy": accuracy}, output, target, shape[0], tally, row, right)
        found.append(tally.result(Group()))
    assert found[0] == found[1]
    assert found[0]["accuracy"][1] == 3 * output.argmax(1).numel()
