import importlib.util
import pickle
import sys
import threading
import tracemalloc
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from kway import by_value
from kway.launch.payload import check, dump, load

LARGE = 100_000


def there_and_back(value, folder=None):
    return load(dump(value, folder))


def test_to_check_whether_a_thing_can_be_sent_takes_no_memory_of_its_size():
    things = [bytes(10_000_000), np.ones(1_000_000), torch.ones(1_000_000), "a" * 10_000_000]
    tracemalloc.start()
    try:
        check(things)
        assert tracemalloc.get_traced_memory()[1] < 12_000_000
        with pytest.raises(TypeError, match="lock"):
            check([*things, threading.Lock()])
    finally:
        tracemalloc.stop()


def test_large_memory_goes_to_one_file_and_small_does_not(tmp_path):
    payload = dump([torch.arange(LARGE), np.arange(LARGE), torch.arange(10)], tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == 2 * LARGE * 8
    assert len(payload) < 5000
    first, second, third = load(payload)
    assert torch.equal(first, torch.arange(LARGE))
    assert np.array_equal(second, np.arange(LARGE))
    assert torch.equal(third, torch.arange(10))


def test_without_a_folder_everything_is_in_the_bytes():
    assert torch.equal(there_and_back(torch.arange(LARGE)), torch.arange(LARGE))


def test_a_write_reaches_no_other_reader_and_not_the_sender(tmp_path):
    sent = torch.zeros(LARGE)
    payload = dump((sent, np.zeros(LARGE)), tmp_path)
    (one, one_array), (two, two_array) = load(payload), load(payload)
    one += 1
    one_array += 1
    assert two.sum() == 0 == sent.sum()
    assert two_array.sum() == 0
    assert load(payload)[0].sum() == 0


@pytest.mark.parametrize("size", [4, LARGE])
def test_shared_storage_stays_shared(tmp_path, size):
    base = torch.zeros(size, 2)
    whole, column = there_and_back((base, base[:, 1]), tmp_path)
    column += 1
    assert whole[:, 1].sum() == size
    assert whole[:, 0].sum() == 0


def test_tied_parameters_stay_one(tmp_path):
    model = nn.Sequential(nn.Linear(300, 300, bias=False), nn.Linear(300, 300, bias=False))
    model[1].weight = model[0].weight
    got = there_and_back(model, tmp_path)
    assert got[1].weight is got[0].weight
    assert len(list(got.parameters())) == 1
    assert torch.equal(got[0].weight, model[0].weight)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.empty(3, 0),
        torch.tensor(True),
        torch.randn(5).bfloat16(),
        torch.randn(3, 4, dtype=torch.complex128),
        torch.tensor([1, 65535], dtype=torch.uint16),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(300, 300).t(),
        torch.eye(3).to_sparse(),
    ],
    ids=["empty", "empty2d", "bool", "bf16", "complex", "uint16", "channels_last", "strided", "sparse"],
)
def test_tensors_of_every_kind(tmp_path, tensor):
    got = there_and_back(tensor, tmp_path)
    assert (got.dtype, got.shape, got.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(got.to_dense(), tensor.to_dense())
    if tensor.layout == torch.strided:
        assert got.stride() == tensor.stride()


def test_an_old_weight_norm_after_a_forward():
    model = nn.utils.weight_norm(nn.Linear(3, 2))
    before = model(torch.ones(1, 3))
    got = there_and_back(model)
    assert torch.equal(got(torch.ones(1, 3)), before)
    with torch.no_grad():
        got.weight_g *= 2
    assert torch.allclose(got(torch.ones(1, 3)) - got.bias, 2 * (before - model.bias))


def test_a_parametrized_module_keeps_computing_its_weight():
    model = nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    model[1].register_buffer("seen", torch.ones(1))
    before = model(torch.ones(1, 3))
    got = there_and_back(model)
    assert torch.equal(got(torch.ones(1, 3)), before)
    assert got.state_dict().keys() == model.state_dict().keys()
    assert isinstance(got[1], nn.Linear)
    assert type(got[1]).__name__ == type(model[1]).__name__
    with torch.no_grad():
        got[1].parametrizations.weight.original0 *= 2
    assert torch.allclose(got[1].weight, 2 * model[1].weight)
    parametrize.remove_parametrizations(got[1], "weight")
    assert type(got[1]) is nn.Linear
    assert parametrize.is_parametrized(model[1])


def test_lambdas_closures_and_local_classes():
    things = [1, 2]

    class Local:
        def __init__(self):
            self.things = things

    double, local = there_and_back((lambda x: 2 * x + len(things), Local()))
    assert double(4) == 10
    assert local.things == things


def test_functions_keep_their_file_so_that_tracebacks_show_the_line():
    def inner():
        return [lambda: 1]

    assert there_and_back(inner).__code__.co_filename == __file__
    assert there_and_back(inner)()[0].__code__.co_filename == __file__


def test_a_module_loaded_from_a_file_travels_by_value(monkeypatch):
    module = types.ModuleType("loaded_from_a_file")
    exec("factor = 3\ndef scale(x):\n    return factor * x", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    by_reference = dump(module.scale)
    module.__kway_by_value__ = True
    whole = dump(module.scale)
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(ModuleNotFoundError):
        load(by_reference)
    assert load(whole)(2) == 6


def loaded(monkeypatch, name):
    module = types.ModuleType(name)
    exec("class Thing: ...\ndef give():\n    return Thing", module.__dict__)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("nameless", [False, True])
def test_what_stands_in_a_package_loaded_from_a_file_travels_by_value(monkeypatch, nameless):
    name = f"from_a_file_{nameless}"  # cloudpickle remembers it
    package, part = loaded(monkeypatch, name), loaded(monkeypatch, f"{name}.part")
    package.__kway_by_value__ = True
    if nameless:
        part.give.__module__ = None  # cloudpickle looks through all modules for such a one
    for sent in (part.give, part.Thing):
        payload = dump(sent)
        with monkeypatch.context() as elsewhere:
            elsewhere.delitem(sys.modules, package.__name__)
            elsewhere.delitem(sys.modules, part.__name__)
            assert load(payload).__name__ == sent.__name__


def test_a_payload_of_nothing_from_a_file_asks_no_module(monkeypatch):
    asked = []
    monkeypatch.setattr(by_value, "_is_marked", asked.append)
    assert there_and_back([1.5, "text", torch.zeros(2)])[:2] == [1.5, "text"]
    assert len(asked) < 20


def test_x02_functions_that_mention_modules_of_a_class_of_their_own():
    def switch():
        torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark
        return torch.backends.cudnn, torch.ops.aten, torch.backends.mkldnn

    assert there_and_back(switch)() == (torch.backends.cudnn, torch.ops.aten, torch.backends.mkldnn)
    cudnn = torch.backends.cudnn
    assert there_and_back(lambda: cudnn)() is torch.backends.cudnn


def test_a_module_of_a_class_of_its_own_that_no_import_finds_is_an_error():
    class Odd(types.ModuleType):
        pass

    with pytest.raises(TypeError, match="Odd"):
        dump(Odd("torch"))


def test_a_module_loaded_from_a_file_with_a_class_of_its_own_is_refused(monkeypatch):
    odd = type("Odd", (types.ModuleType,), {})("odd_file")
    odd.__kway_by_value__ = True
    monkeypatch.setitem(sys.modules, "odd_file", odd)
    with pytest.raises(pickle.PicklingError, match="'odd_file', loaded from a file, has a class of its own"):
        dump(odd)


def test_modules_that_are_imported_when_they_are_first_used_are_left_alone(monkeypatch, tmp_path):
    (tmp_path / "late.py").write_text("import not_installed_anywhere")
    spec = importlib.util.spec_from_file_location("late", tmp_path / "late.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    late = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "late", late)
    spec.loader.exec_module(late)
    assert there_and_back(lambda: 3)() == 3


@pytest.mark.parametrize("mode", ["r", "rb", "a"])
def test_an_open_file_is_refused_whatever_its_mode(mode, tmp_path):
    path = tmp_path / "x.txt"
    path.touch()
    with (
        path.open(mode) as file,
        pytest.raises((TypeError, pickle.PicklingError), match=r"open file|cannot pickle"),
    ):
        dump(file)


def test_what_cannot_travel_leaves_no_file(tmp_path):
    with pytest.raises(TypeError, match="lock"):
        dump([torch.zeros(LARGE), threading.Lock()], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_last_reader_may_remove_the_file(tmp_path):
    got = load(dump(torch.ones(LARGE), tmp_path), keep=False)
    assert list(tmp_path.iterdir()) == []
    assert got.sum() == LARGE


class Masked(nn.Linear):
    """Its hooks know the module that holds their parameter."""

    def __init__(self):
        super().__init__(2, 2)
        self.factor, self.seen = 0.0, []
        self.weight.register_hook(lambda gradient: gradient * self.factor)
        self.weight.register_post_accumulate_grad_hook(self.seen.append)


def test_hooks_of_parameters_travel_with_them(tmp_path):
    model, other = Masked(), nn.Linear(2, 2)
    got, plain = there_and_back((model, other), tmp_path)
    got.factor = 3.0
    got(torch.ones(1, 2)).sum().backward()
    assert got.weight.grad.eq(3).all()
    assert got.seen[0] is got.weight
    assert model.seen == []
    assert not plain.weight._backward_hooks
    # They act again where what is frozen is trained again.
    model.weight.requires_grad_(False)
    thawed = there_and_back(model, tmp_path)
    thawed.weight.requires_grad_()
    thawed.factor = 5.0
    thawed(torch.ones(1, 2)).sum().backward()
    assert thawed.weight.grad.eq(5).all()


def test_handles_of_hooks_remove_them_where_they_arrive(tmp_path):
    model = Masked()
    model.handles = [
        model.bias.register_hook(lambda gradient: gradient * 5),
        model.bias.register_post_accumulate_grad_hook(model.seen.append),
    ]
    got = there_and_back(model, tmp_path)
    got(torch.ones(1, 2)).sum().backward()
    assert got.bias.grad.eq(5).all()
    for handle in got.handles:
        handle.remove()
    got.zero_grad()
    got(torch.ones(1, 2)).sum().backward()
    assert got.bias.grad.eq(1).all()
    assert len(got.seen) == 3
    assert len(model.bias._backward_hooks) == 1


@pytest.mark.parametrize("large", [False, True])
def test_a_hook_to_come_takes_the_place_of_none(tmp_path, large):
    model = nn.Linear(1, LARGE if large else 1)
    nn.init.ones_(model.weight)
    model.weight.register_hook(lambda gradient: gradient * 3)
    model.register_forward_hook(lambda module, args, output: output * 2)
    written, before = dump(model, tmp_path), RemovableHandle.next_id
    try:
        # As in a new process.
        RemovableHandle.next_id = 0
        got = load(written)
        for _ in range(before):
            got.weight.register_hook(lambda gradient: gradient).remove()
            got.register_forward_hook(lambda module, args, output: None).remove()
    finally:
        RemovableHandle.next_id = max(before, RemovableHandle.next_id)
    got(torch.ones(1, 1)).sum().backward()
    assert got.weight.grad.eq(6).all()


@pytest.mark.gpu
def test_a_tensor_on_a_gpu_arrives_on_the_cpu(tmp_path):
    base = torch.arange(LARGE, device="cuda")
    whole, part = there_and_back((base, base[10:20]), tmp_path)
    assert whole.device.type == part.device.type == "cpu"
    assert torch.equal(whole, base.cpu())
    part += 1
    assert whole[10] == 11
    module = there_and_back(nn.Linear(2, 2).cuda())
    assert module.weight.device.type == "cpu"
    assert module.weight.is_leaf
