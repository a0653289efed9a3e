"""Files have the model's own names, whatever wrapped it when it was saved or wraps it when it is loaded."""

from pathlib import Path

import pytest
import torch
from torch import nn

from kway.checkpoints.loading import load_own_weights
from kway.checkpoints.names import WRAPPERS, own_modules, own_names, own_weights
from kway.checkpoints.reading import open_checkpoint
from kway.checkpoints.saving import write_checkpoint
from kway.checkpoints.snapshot import Snapshot, freeze
from kway.errors import UsageError


class Inner(nn.Module):
    """A user's model with parts that are called like the attributes of wrappers."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.BatchNorm1d(2)
        self.scale = nn.Parameter(torch.randn(2))


OWN = {"module.weight", "module.bias", "scale"} | {
    f"_orig_mod.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
}


def checkpointed(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(model)


def checkpointed_inside(model):
    model.module = checkpointed(model.module)
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_inside(model):
    model.module = compiled(model.module)
    return model


WRAPS = {
    "bare": lambda model: model,
    "data parallel": nn.DataParallel,
    "compiled": compiled,
    "compiled inside": compiled_inside,
    "checkpoint": checkpointed,
    "checkpoint inside": checkpointed_inside,
    "all": lambda model: compiled(nn.DataParallel(checkpointed(model))),
}


@pytest.mark.parametrize("save", WRAPS)
def test_k01_saved_from_any_wrapper_loads_in_every_other_bit_equal(save, tmp_path):
    source = Inner()
    right = {name: value.clone() for name, value in source.state_dict().items()}
    saved = WRAPS[save](source)
    weights = own_weights(saved, saved.state_dict())
    assert weights.keys() == OWN
    read = open_checkpoint(
        write_checkpoint(tmp_path / "c", freeze(Snapshot(1, 0, weights, {}), {}))
    ).weights()
    for load in WRAPS.values():
        target = Inner()
        load_own_weights(load(target), read, "of the test")
        state = target.state_dict()
        assert all(torch.equal(state[name], right[own]) for name, own in own_names(target, state).items())
    bare = Inner()
    bare.load_state_dict(read)


def test_k01_data_parallel_by_process_and_sharded_models_too(ranks):
    def body(context):
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        from kway.checkpoints.loading import load_own_weights
        from kway.checkpoints.names import own_names, own_weights

        names = []
        for wrap in (DistributedDataParallel, fully_shard):
            model = wrap(torch.nn.Sequential(torch.nn.Linear(2, 2)))
            names.append(sorted(own_names(model, model.state_dict()).values()))
        wrapped = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2)))
        bare = torch.nn.Sequential(torch.nn.Linear(2, 2))
        load_own_weights(bare, own_weights(wrapped, wrapped.state_dict()), "of DDP")
        return names, torch.equal(bare[0].weight, wrapped.module[0].weight)

    assert ranks.run(body, size=1) == [([["0.bias", "0.weight"]] * 2, True)]


def test_wrappers_are_classes_that_torch_has():
    import importlib

    for path, attribute in WRAPPERS.items():
        module, _, name = path.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        assert issubclass(kind, nn.Module), path
        assert attribute


@pytest.mark.parametrize("wrap", ["bare", "compiled"])
def test_k01_a_load_that_matches_nothing_is_an_error(wrap):
    model = nn.Sequential(nn.Linear(2, 2))
    before = model[0].weight.clone()
    wrong = {f"model.{name}": torch.ones_like(value) for name, value in model.state_dict().items()}
    for weights, said in ((wrong, r"model\.0\.bias, model\.0\.weight"), ({}, "none")):
        with pytest.raises(
            UsageError, match=rf"weights x: missing 0\.bias, 0\.weight; not in the model {said}:"
        ):
            load_own_weights(WRAPS[wrap](model), weights, Path("x"))
    assert torch.equal(model[0].weight, before)


class Beside(nn.DataParallel):
    """A wrapper with a layer of its own, called as one of the model's."""

    def __init__(self, model):
        super().__init__(model)
        self.scale = nn.Linear(1, 1)
        self.add_module("0", nn.Linear(2, 2))


def test_two_things_of_one_own_name_are_refused_and_modules_go_by_theirs():
    model = compiled(nn.Sequential(nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))))
    inner = model._orig_mod[0].module
    assert own_modules(model) == {"": model._orig_mod, "0": inner, "0.0": inner[0]}
    both = Beside(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(
        UsageError, match=r"'module\.0\.weight' and '0\.weight' of the model are both '0\.weight'"
    ):
        own_weights(both, both.state_dict())


@pytest.mark.parametrize(
    "weights", [{"weight": 1.0}, {1: torch.ones(1)}, {"": torch.ones(1), "a.": torch.ones(1)}]
)
def test_what_is_no_state_dict_is_refused(weights):
    with pytest.raises(UsageError, match="weights x: "):
        load_own_weights(nn.Linear(2, 2), weights, "x")


def test_missing_extra_and_other_shapes_are_listed_and_nothing_is_loaded():
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(UsageError, match="missing bias; not in the model extra"):
        load_own_weights(model, {"weight": torch.ones(2, 2), "extra": torch.ones(1)}, "x")
    with pytest.raises(UsageError, match=r"'bias' has shape \(3,\): the model has \(2,\)"):
        load_own_weights(model, {"weight": torch.ones(2, 2), "bias": torch.ones(3)}, "x")
    assert torch.equal(model.weight, before)


def test_a_file_may_have_one_name_of_what_is_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out, self.other = nn.Embedding(2, 2), nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
            self.out.weight = self.into.weight

    model, ones = Tied(), torch.ones(2, 2)
    for name in ("into.weight", "out.weight"):
        load_own_weights(model, {name: ones, "other.weight": ones, "other.bias": ones[0]}, "x")
        assert model.into.weight is model.out.weight
        assert model.out.weight.eq(1).all()
        model.out.weight.data.zero_()
    with pytest.raises(UsageError, match=r"missing other\.weight; not in the model none"):
        load_own_weights(model, {"into.weight": ones, "other.bias": ones[0]}, "x")
