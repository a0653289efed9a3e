"""Functions of copies: each closes over copies of its own, and what cannot be copied, or is global, stays shared."""

import random
import threading
from collections import OrderedDict, defaultdict, deque
from functools import cache, lru_cache, partial
from weakref import ref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import kway
from kway.jobs.threads import _copied

SGD = partial(torch.optim.SGD, lr=0.1)


class Extractor(nn.Module):
    """Reads back what a hook has kept of a frozen layer, which nothing orders after the other replica's."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (
            nn.Linear(64, 256).requires_grad_(False),
            nn.Linear(256, 256),
            nn.Linear(256, 2),
        )
        found = {}
        self.first.register_forward_hook(lambda module, args, out: found.__setitem__("x", out))
        self.get = lambda: found["x"]

    def forward(self, x):
        self.first(x)
        hidden = self.middle(x.repeat(1, 4)).relu()
        return self.last(self.get().relu() + hidden)


def test_features_that_a_hook_keeps_are_each_replicas_own():
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(2000, 64, generator=draw), torch.randint(2, (2000,), generator=draw)

    def losses(**where):
        torch.manual_seed(0)
        job = kway.Job(Extractor, nn.CrossEntropyLoss(), SGD, data, batch_size=400, seed=1, precision="fp64")
        return [
            epoch["train_loss"] for epoch in kway.train(job, epochs=1, tune=False, echo=False, **where).epochs
        ]

    alone = losses(devices="cpu:1")
    for _ in range(12):
        assert losses(devices="cpu:2", strategy="threads") == pytest.approx(alone, abs=1e-12)


class Keeper:
    def __init__(self, store):
        self.store = store

    def __call__(self, module, args, out):
        self.store["object"] = out


def hooked():
    """Return a layer, with one store that many kinds of functions know, and that store."""
    layer, store = nn.Linear(2, 2), {}

    def later(module, args, out, into=store, *, named=store):
        into["default"] = named["keyword"] = out

    def many(into, module, args, out):
        into["partial"] = out

    def itself(again=True):
        return itself(False) if again else store

    layer.register_forward_hook(lambda module, args, out: store.__setitem__("closure", out))
    layer.register_forward_hook(later)
    layer.register_forward_hook(partial(many, store))
    layer.register_forward_pre_hook(lambda module, args: layer.marks.append(1))
    layer.register_forward_hook(Keeper(store))
    layer.marks = []
    layer.get, layer.look, layer.again = lambda: store, store.get, itself
    layer.nested = {"pair": ("name", lambda: store), "queue": deque([lambda: store])}
    layer.parent, layer.kept = ref(layer), TensorDataset(torch.zeros(2))
    layer.known = lambda: (layer, layer.weight, layer.parent())
    return layer, store


def test_all_functions_of_a_replica_know_one_copy():
    layer, store = hooked()
    (copied,) = _copied((layer,))
    copied(torch.zeros(1, 2))
    assert (store, layer.marks, copied.marks) == ({}, [], [1])
    held = copied.get()
    assert set(held) == {"closure", "default", "keyword", "partial", "object"}
    for each in (copied.again(), copied.nested["pair"][1](), copied.nested["queue"][0]()):
        assert each is held
    assert copied.look("partial") is held["partial"]
    assert all(
        found is own for found, own in zip(copied.known(), (copied, copied.weight, copied), strict=True)
    )
    # The user's own are what they were.
    layer(torch.zeros(1, 2))
    assert set(store) == set(held)
    assert layer.known()[0] is layer
    assert layer.get() is store


def test_a_variable_that_functions_write_is_one_in_each_replica():
    def counter():
        count = 0

        def hook(*_):
            nonlocal count
            count += 1

        return hook, lambda: count

    layer = nn.Linear(2, 2)
    hook, layer.count = counter()
    layer.register_forward_hook(hook)
    copies = [_copied((layer,))[0] for _ in range(2)]
    for passes, each in enumerate([layer, *copies]):
        for _ in range(passes):
            each(torch.zeros(1, 2))
    assert [each.count() for each in (layer, *copies)] == [0, 1, 2]


def test_model_and_loss_find_one_another_in_a_replica():
    layer, store = hooked()

    def loss(output, target):
        return (output - target).sum() + store["closure"].sum()

    copied, theirs = _copied((layer, loss))
    copied(torch.ones(1, 2))
    copied.get()["closure"] = torch.tensor(5.0)
    assert theirs(torch.zeros(1), torch.zeros(1)) == 5
    assert store == {}


def test_what_was_computed_data_generators_and_what_cannot_be_copied(tmp_path):
    layer = nn.Linear(2, 2)
    kept, lock = {"x": layer(torch.ones(1, 2))}, threading.Lock()
    data, generator = TensorDataset(torch.zeros(3)), torch.Generator().manual_seed(4)
    fixed, written = np.zeros(2), torch.zeros(2)
    fixed.flags.writeable = False
    shared = {"lock": lock}
    file = (tmp_path / "log").open("w")
    logged = {"file": file, "lines": []}
    layer.all = lambda: (kept, lock, shared, data, fixed, written, generator, torch, file, logged)
    (copied,) = _copied((layer,))
    for number, (own, other) in enumerate(zip(layer.all(), copied.all(), strict=True)):
        assert (own is other) == (number in (1, 2, 3, 4, 7, 8)), number
    assert copied.all()[9]["file"] is file
    file.close()
    assert torch.equal(copied.all()[0]["x"], kept["x"])
    assert torch.rand(2, generator=copied.all()[6]).equal(torch.rand(2, generator=generator))


def test_what_all_code_shares_stays_itself():
    layer = nn.Linear(2, 2)
    layer.pair = nn.functional.relu, kway.accuracy, _copied, random.uniform
    uniform = random.uniform
    layer.draw = lambda: uniform(0, 1)
    (copied,) = _copied((layer,))
    assert copied.pair == layer.pair
    random.seed(3)
    first = copied.draw()
    random.seed(3)
    assert random.uniform(0, 1) == first


class Slotted:
    __slots__ = ("empty", "get")

    def __init__(self, get):
        self.get = get


class Again(partial):
    """Of a class of its own, with a table of attributes."""


class Remembering(nn.Module):
    """Keeps functions that know it in many kinds of places."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(2, 2)
        self.method = cache(self.named)
        self.closure = lru_cache(maxsize=3, typed=True)(lambda: self.last)
        self.inside = {"cached": [cache(self.named)]}
        self.missing = defaultdict(lambda: self.last)
        self.slotted = Slotted(lambda: self.last)
        self.fixed = frozenset([lambda: self.last])
        self.again = Again(lambda held: held.last, self)
        self.labels = OrderedDict({lambda: self.last: "last", "other": 0})

        @cache
        def down(count):
            return self.last if count == 0 else down(count - 1)

        self.down = down

    def named(self, name):
        return getattr(self, name)

    def found(self):
        yield from (
            self.method("last"),
            self.closure(),
            self.inside["cached"][0]("last"),
            self.missing["any"],
        )
        yield from (self.slotted.get(), self.again(), self.down(2), *(each() for each in self.fixed))
        yield next(iter(self.labels))()


def test_functions_are_the_copys_own_wherever_they_are_kept():
    own = Remembering()
    # What a cache has kept by then is of the user's.
    assert all(found is own.last for found in own.found())
    del own.missing["any"]
    (copied,) = _copied((own,))
    assert all(found is copied.last for found in copied.found())
    assert all(found is own.last for found in own.found())
    assert copied.closure.cache_parameters() == {"maxsize": 3, "typed": True}
    assert [*copied.labels.values()] == ["last", 0]
    assert not hasattr(copied.slotted, "empty")


@lru_cache
def doubled(number):
    return 2 * number


def test_a_cache_that_a_global_name_leads_to_or_that_knows_nothing_stays():
    layer = nn.Linear(1, 1)
    layer.both = doubled, lru_cache(len)
    (copied,) = _copied((layer,))
    assert all(map(lambda own, other: own is other, layer.both, copied.both))


def test_what_could_not_be_copied_leaves_nothing_behind():
    layer, lock = nn.Linear(1, 1), threading.Lock()
    first, store = {"before": [], "lock": lock}, []
    layer.all = [lambda: first, lambda: first["before"], lambda: store, lambda: first]
    (copied,) = _copied((layer,))
    one, _, two, again = (each() for each in copied.all)
    assert one is again is first
    assert two is not store


def test_hooks_of_parameters_are_those_of_the_copy():
    layer, seen = nn.Linear(2, 1), []
    layer.seen = lambda: seen
    layer.weight.register_hook(lambda gradient: seen.append("first") or gradient * 3)
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append("then"))
    (copied,) = _copied((layer,))
    copied(torch.ones(1, 2)).sum().backward()
    assert copied.weight.grad.tolist() == [[3, 3]]
    assert sorted(copied.seen()) == ["first", "then"]
    assert seen == []


def test_handles_of_hooks_remove_those_of_the_copy():
    layer = nn.Linear(2, 1)
    handle = layer.weight.register_hook(lambda gradient: gradient * 3)
    lock = threading.Lock()
    late = layer.bias.register_hook(lambda gradient: gradient * 5 if lock else gradient)
    layer.handle, layer.leave = handle, lambda: late.remove() or lock
    (copied,) = _copied((layer,))
    copied(torch.ones(1, 2)).sum().backward()
    assert (copied.weight.grad.tolist(), copied.bias.grad.tolist()) == ([[3, 3]], [5])
    copied.handle.remove()
    copied.leave()
    copied.zero_grad()
    copied(torch.ones(1, 2)).sum().backward()
    assert (copied.weight.grad.tolist(), copied.bias.grad.tolist()) == ([[1, 1]], [1])
    layer(torch.ones(1, 2)).sum().backward()
    assert (layer.weight.grad.tolist(), layer.bias.grad.tolist()) == ([[3, 3]], [5])


def test_a_hook_that_removes_itself_knows_the_copy_s_table():
    layer, lock = nn.Linear(1, 1), threading.Lock()

    class Locked:
        def __init__(self):
            self.lock = lock

        def __call__(self, gradient):
            return gradient * 5

    def once(gradient):
        handle.remove()
        return gradient * 3

    handle = layer.weight.register_hook(once)
    layer.weight.register_hook(Locked())
    (copied,) = _copied((layer,))
    for right in (15, 5):
        copied.zero_grad()
        copied(torch.ones(1, 1)).sum().backward()
        assert copied.weight.grad.item() == right
    assert len(layer.weight._backward_hooks) == 2


def test_what_is_noted_on_parameters_is_noted_on_the_copy_s():
    layer = nn.Linear(1, 1)
    layer.bias.decays, layer.weight.tied_to = False, [layer.bias]
    (copied,) = _copied((layer,))
    assert copied.bias.decays is False
    assert copied.weight.tied_to[0] is copied.bias
