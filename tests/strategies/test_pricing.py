import pytest
from tests.measured import usual
from tests.workloads import workload

from kway.comm.buckets import BUCKET_BYTES
from kway.cost.estimate import COMPUTE
from kway.strategies import layout
from kway.strategies.base import Axis
from kway.strategies.pricing import priced


class Split(Axis):
    """An axis that says nothing of its price but whether it splits the batch."""

    name, order, levels, splits_batch = "split", 50, frozenset({"math"}), True

    def sizes(self, devices):
        return [1, devices]

    def refuses(self, job, model, size, level):
        return None

    def apply(self, part, group):
        raise AssertionError("nothing is run to be priced")


class Layers(Split):
    """An axis that halves what a device computes and holds."""

    name, order, splits_batch = "layers", 40, False

    def price(self, estimate, size, devices):
        estimate.terms[COMPUTE] /= size
        estimate.memory["weights"] /= size
        estimate.add("handing on (point to point)", 1e-3 * (size - 1))


class Silent(Split):
    name, order, splits_batch = "silent", 60, False


@pytest.fixture
def known(monkeypatch):
    """Axes that only this test has, as if they were files of the folder."""
    there = layout.axes()
    every = {**there, **{axis.name: axis for axis in (Split(), Layers(), Silent())}}
    monkeypatch.setattr("kway.strategies.pricing.axes", lambda: every)


def price(sizes, devices, **more):
    return priced(sizes, ["cpu"] * devices, "eager", workload(), usual(), threads=1, **more)


def test_an_axis_that_splits_the_batch_costs_its_sum_of_gradients_unless_it_says_otherwise(known):
    assert price({"split": 2}, 2).terms == price({"data": 2}, 2).terms
    base = workload()
    layers = [{**base.layers[0], "parameter_bytes": BUCKET_BYTES}] * 4
    parameters = {**base.parameters, "gradient_bytes": 4 * BUCKET_BYTES}
    large = workload(layers=layers, parameters=parameters, collectives=[])
    split, data = (
        priced({name: 2}, ["cpu"] * 2, "eager", large, usual(), threads=1) for name in ("split", "data")
    )
    # Hidden only where the axis knows that it is.
    assert split.terms["all-reduce"] > data.terms["all-reduce"]


def test_an_axis_changes_what_is_there_and_adds_its_own(known):
    alone, two = price({}, 1), price({"layers": 2}, 2)
    assert two.samples == alone.samples
    assert two.terms[COMPUTE] == alone.terms[COMPUTE] / 2
    assert two.terms["handing on (point to point)"] == 1e-3
    assert two.memory["weights"] == 2_000


def test_axes_of_a_product_come_in_their_order_and_shares_are_those_that_split_the_batch(known):
    four = price({"data": 2, "layers": 2}, 4)
    assert four.samples == 64
    assert list(four.terms).index("handing on (point to point)") < list(four.terms).index("all-reduce")


def test_an_axis_of_which_nothing_is_known_is_noted_not_praised(known):
    two = price({"silent": 2}, 2)
    assert two.notes[-1].startswith("silent: nothing is known")
    assert two.step_s >= price({}, 1).step_s


def test_the_batch_is_the_workloads_unless_named():
    assert price({"data": 2}, 2).batch_size == 128
    assert price({"data": 2}, 2, batch_size=10).samples == 5
