"""What is found inside of a step: operations and bytes by layer, of models of any kind."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kway

N = 16
X, Y = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 4
SEQUENCES = torch.randn(64, 5, 8, generator=torch.Generator().manual_seed(0))
SGD = partial(torch.optim.SGD, lr=0.01)


def profiled(model, data=(X, Y), **more):
    given = {"loss": nn.CrossEntropyLoss(), "optimizer": SGD, "batch_size": N, **more}
    level = given.pop("exactness", "math")
    devices = given.pop("devices", "cpu:1")
    return kway.profile(kway.Job(model, data=data, **given), devices=devices, exactness=level, seconds=0.1)


def flop(record):
    return {layer["name"]: layer["flop_per_sample"] for layer in record.layers}


def product(inner, outer, times=3):
    """Operations a sample of a linear layer: forward, and as many for each gradient."""
    return times * 2 * inner * outer


def two_layers():
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))


def test_operations_parameters_and_what_is_kept_are_those_of_the_arithmetic():
    record = profiled(two_layers, optimizer=partial(torch.optim.Adam, lr=0.01))
    # The input needs no gradient.
    assert flop(record) == {"": 0, "0": product(8, 6, 2), "1": 0, "2": product(6, 4), "(loss)": 0}
    assert record.flop_per_sample == product(8, 6, 2) + product(6, 4)
    numbers = 8 * 6 + 6 + 6 * 4 + 4
    own = record.parameters
    assert (own["count"], own["trainable_count"]) == (numbers, numbers)
    assert (own["bytes"], own["gradient_bytes"]) == (4 * numbers, 4 * numbers)
    # Two moments a number, and a count of steps a tensor.
    assert own["optimizer_bytes"] == 4 * (2 * numbers + 4)
    assert record.gradients == {"float32": numbers}
    assert record.sample_bytes == 8 * 4 + 8
    # Of a sample: itself, what the ReLU gives, and the logarithms of four probabilities.
    assert record.memory["activation_bytes_per_sample"] == record.sample_bytes + 4 * 6 + 4 * 4
    kept = {layer["name"]: layer["activation_bytes_per_sample"] for layer in record.layers}
    assert (kept["0"], kept["1"], kept["2"]) == (0, 24, 0)
    peak = {each["samples"]: each["bytes"] for each in record.memory["peak"] if each["devices"] == 1}
    assert peak[N] - peak[N // 2] == record.memory["activation_bytes_per_sample"] * N // 2


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.other, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.other.weight = self.inner.weight

    def forward(self, x):
        return self.last(self.other(torch.tanh(self.inner(torch.tanh(self.inner(x)))))) * 2


def test_layers_called_twice_count_twice_and_tied_weights_once():
    record = profiled(CalledTwice)
    once = product(8, 8)
    assert flop(record)["inner"] == 2 * once - product(8, 8, 1)
    assert flop(record)["other"] == once
    assert record.parameters["tied"] == ["other.weight"]
    assert record.parameters["count"] == 64 + 8 + 8 + 32 + 4
    # What the model computes by itself is its own: two tanh in forward and in backward.
    itself = next(layer for layer in record.layers if layer["name"] == "")
    assert itself["activation_bytes_per_sample"] == 2 * 8 * 4
    assert itself["backward"]["fixed_s"] + itself["backward"]["per_sample_s"] > 0


class Branches(nn.Module):
    """Takes another way in every step."""

    def __init__(self):
        super().__init__()
        self.ways, self.steps = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)]), 0

    def forward(self, x):
        self.steps += 1
        return self.ways[self.steps % 2](x)


def test_dynamic_control_flow_and_what_never_ran():
    record = profiled(Branches, loss=nn.CrossEntropyLoss())
    assert record.flop_per_sample == product(8, 4, 2)
    assert {"ways.0", "ways.1"} <= flop(record).keys()


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, mask):
        return {"scores": self.layer(x * mask)}


def of_dict(output, target):
    return nn.functional.cross_entropy(output["scores"], target, reduction="none")


def test_several_inputs_and_a_dict_of_outputs():
    data = {"x": X, "mask": torch.ones(64, 8), "target": Y}
    record = profiled(Masked, data, loss=of_dict, inputs=["x", "mask"], target="target")
    assert flop(record)["layer"] == product(8, 4, 2)
    assert record.sample_bytes == 2 * 8 * 4 + 8


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells, self.last = kind(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.cells(x)[0][:, -1])


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_networks_are_counted(kind, gates):
    record = profiled(partial(Recurrent, kind), (SEQUENCES, Y))
    into, over = 5 * product(8, 16 * gates, 1), 5 * product(16, 16 * gates, 1)
    # No gradient of the input, nor of the first state.
    backward = into + 2 * over - product(16, 16 * gates, 1)
    assert flop(record)["cells"] == into + over + backward
    assert not record.notices


class HalfFrozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.body.requires_grad_(False)

    def forward(self, x):
        return self.head(self.body(x))


def test_frozen_parts_have_no_gradients():
    record = profiled(HalfFrozen)
    assert flop(record) == {"": 0, "body": product(8, 8, 1), "head": product(8, 4, 2), "(loss)": 0}
    assert record.parameters["trainable_count"] == 36
    assert record.gradients == {"float32": 36}


class Recomputing(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.reentrant = reentrant

    def forward(self, x):
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_counts_as_computed(reentrant):
    record = profiled(partial(Recomputing, reentrant))
    once = product(8, 8, 1)
    # Without reentrance it ends as soon as backward has what it needs: the input, before the product.
    assert record.flop_per_sample == (2 + (4 if reentrant else 3)) * once + product(8, 4)


def blocks():
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0) for _ in range(3)]
    return nn.Sequential(nn.Sequential(*layers), nn.Flatten(), nn.Linear(40, 4))


def test_blocks_computed_again_keep_less():
    record = profiled(blocks, (SEQUENCES, Y))
    again = record.memory["checkpointed_activation_bytes_per_sample"]
    # At the least what goes into the blocks after the first.
    assert 2 * 5 * 8 * 4 <= again < record.memory["activation_bytes_per_sample"] / 2
    assert profiled(two_layers).memory["checkpointed_activation_bytes_per_sample"] is None


class Caching(nn.Module):
    """Attention over all keys of a list that it appends to, as models that also generate do."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x, keys):
        keys.append(self.project(x))
        return x + (torch.ones(5, 5) @ torch.cat(keys, 1)).tanh()


class WithCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Caching(), Caching()]), nn.Linear(40, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, [])
        return self.head(x.flatten(1))


def test_a_model_whose_blocks_cannot_be_computed_again_is_profiled_all_the_same():
    record = profiled(WithCache, (SEQUENCES, Y))
    assert record.memory["checkpointed_activation_bytes_per_sample"] is None
    assert (
        sum("what computing its blocks again would save is not known" in line for line in record.notices) == 1
    )
    assert record.timed("eager")


def normalised():
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))


def test_batch_normalisation_adds_two_small_collectives_at_level_math_alone():
    record = profiled(normalised, devices="cpu:2")
    # Counts, means and variances of six channels; two sums a channel.
    assert record.collectives == [
        {"when": "forward", "what": "all-gather", "bytes": 13 * 8, "times": 1},
        {"when": "backward", "what": "all-gather", "bytes": 12 * 8, "times": 1},
    ]
    assert profiled(normalised, devices="cpu:2", exactness="loose").collectives == []
    assert profiled(two_layers, devices="cpu:2").collectives == []


def test_micro_batches_keep_less_at_once():
    whole, cut = profiled(two_layers), profiled(two_layers, micro_batch=4)
    assert cut.flop_per_sample >= whole.flop_per_sample


def test_scripted_layers_are_one_piece():
    record = profiled(
        lambda: nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(8, 8))), nn.Linear(8, 4))
    )
    assert flop(record)["1"] == product(8, 4)
    assert record.flop_per_sample == product(8, 8, 2) + product(8, 4)
