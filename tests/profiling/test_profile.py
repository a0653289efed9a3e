"""``kway.profile``: what it leaves as it was, which shares it times, what it starts and refuses."""

import random
import threading
from functools import partial

import numpy as np
import pytest
import torch
from tests.started import started
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import kway
from kway.comm import group as group_module
from kway.errors import UsageError
from kway.profiling.seats import Seat
from kway.profiling.sitting import Sitting
from kway.records import Plan
from kway.step.kinds import KINDS
from kway.strategies.engine import Engine
from kway.training.parts import training_parts
from kway.workload import Workload

X, Y = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 4
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def net():
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 4))


def job(model=net, data=(X, Y), optimizer=SGD, **more):
    return kway.Job(model, nn.CrossEntropyLoss(), optimizer, data, **{"batch_size": 16, **more})


def profiled(of, devices="cpu:2", **more):
    return kway.profile(of, devices=devices, seconds=0.1, **more)


def drawn():
    return random.random(), np.random.rand(), torch.rand(1).item()


def seeded():
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)


class Counting(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, place):
        return X[place], Y[place]


def test_model_random_state_threads_and_the_order_of_the_data_stay_as_they_are():
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Counting(), batch_size=16, shuffle=True, generator=generator)
    state = generator.get_state()
    model = net().eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(module._forward_hooks) for module in model.modules()]
    threads = torch.get_num_threads()
    seeded()
    profiled(job(model, loader, batch_size=None))
    after = drawn()
    seeded()
    assert after == drawn()
    assert torch.equal(generator.get_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad.eq(1).all()
    assert not any(module.training for module in model.modules())
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.get_num_threads() == threads


class Once(IterableDataset):
    """Can be read once, and has fewer batches than are timed."""

    def __init__(self):
        self.items = iter([(X[place], Y[place]) for place in range(48)])

    def __iter__(self):
        yield from self.items


def test_the_users_data_set_collate_function_and_stream_stay_where_they_are():
    class Asked(Counting):
        asked = 0

        def __getitem__(self, place):
            self.asked += 1
            return super().__getitem__(place)

    class Split:
        asked = 0

        def __call__(self, batch):
            self.asked += 1
            return batch[0]

    own, split = Asked(), Split()
    own.lock = threading.Lock()  # which copy.deepcopy refuses
    assert profiled(job(data=own, inputs=split)).timings
    assert (own.asked, split.asked) == (0, 0)
    stream = Once()
    assert profiled(job(data=stream)).timings
    assert len([*stream]) == 48


def test_data_that_cannot_be_copied_are_refused_before_a_sample_is_asked_for():
    class Unfinished(Counting):
        def __init__(self):
            self.rows = (row for row in range(64))

        def __getitem__(self, place):
            raise AssertionError("asked")

    with pytest.raises(UsageError, match="data of type Unfinished that cannot be copied"):
        profiled(job(data=Unfinished()))


class Advancing:
    """A sampler that goes on from epoch to epoch: how often it was asked is part of a run."""

    def __init__(self):
        self.asked = 0

    def __iter__(self):
        self.asked += 1
        return iter(range(64))

    def __len__(self):
        return 64


def test_the_users_sampler_goes_on_where_it_was():
    sampler = Advancing()
    record = profiled(job(data=DataLoader(Counting(), batch_size=16, sampler=sampler), batch_size=None))
    assert record.batch_size == 16
    assert sampler.asked == 0


def test_no_process_is_started():
    with started() as processes:
        assert profiled(job(), devices="cpu:2").timings
    assert processes == []


def test_shares_are_those_of_the_numbers_of_devices_with_the_threads_of_their_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr("kway.jobs.profiling.rank_threads", lambda device_set: 4 // len(device_set))
    record = profiled(job(batch_size=30), devices="cpu:3", out=tmp_path)
    steps = [(each["devices"], each["threads"], each["samples"]) for each in record.timed("eager")]
    assert sorted(steps) == [(1, 4, 8), (1, 4, 15), (1, 4, 30), (2, 2, 8), (2, 2, 15), (3, 1, 5), (3, 1, 10)]
    for part in ("forward", "backward", "optimizer", "input"):
        assert len(record.timed("eager", part)) == len(steps)
    whole = record.timed("eager", threads=4)[-1]
    parts = [record.timed("eager", part, threads=4)[-1]["seconds"] for part in ("forward", "backward")]
    assert 0 < sum(parts) < 4 * whole["seconds"]
    assert {(fit["threads"], fit["several"]) for fit in record.fits} == {(4, False), (2, True), (1, True)}
    assert record.step_kinds_left["graph"] == "it needs a CUDA device"
    assert Workload.load(tmp_path) == record


def _sent(context, of):
    """Return what one real step of two ranks hands to torch: (kind, bytes) in order."""
    sent = []

    def noted(name, call):
        def run(*given, **more):
            # A gather is told where to write, then what it gives.
            tensor = given[1] if name == "all-gather" else given[0]
            sent.append((name, tensor.nbytes))
            return call(*given, **more)

        return run

    parts = training_parts(of)[0]
    engine = Engine(of, of.model(), {"data": 2}, context.world, "math", parts.order.batch_size)
    loader = engine.loader(parts)
    shares = loader.epoch(0)
    engine.step(next(shares), 0)
    held = group_module._gather_flat, group_module.dist.all_reduce
    group_module._gather_flat = noted("all-gather", held[0])
    group_module.dist.all_reduce = noted("all-reduce", held[1])
    try:
        engine.step(next(shares), 1)
    finally:
        group_module._gather_flat, group_module.dist.all_reduce = held
        engine.close()
        loader.close()
    return sent


def test_collectives_are_those_that_two_real_ranks_call(ranks):
    of = job()
    record = profiled(of)
    said = [(call["what"], call["bytes"]) for call in record.collectives for _ in range(call["times"])]
    said += [("all-reduce", bytes_) for bytes_ in record.buckets]
    assert sorted(ranks.run(_sent, of, size=2)[0]) == sorted(said)


class NotCompiled(nn.Linear):
    def forward(self, x):
        if torch.compiler.is_compiling():
            raise RuntimeError("not this one")
        return super().forward(x)


def test_a_step_kind_that_fails_is_named_with_the_reason(monkeypatch):
    monkeypatch.setattr("kway.jobs.profiling.missing", lambda device: None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    record = profiled(job(partial(NotCompiled, 8, 4)), devices="cpu:1", step_kind="compiled")
    assert record.step_kinds() == ["eager"]
    assert record.step_kinds_left["compiled"]
    monkeypatch.undo()
    monkeypatch.setattr("kway.jobs.profiling.missing", lambda device: "there is no compiler")
    record = profiled(job(), devices="cpu:1", step_kind=["compiled"])
    assert record.step_kinds_left["compiled"] == "there is no compiler"


def test_a_recorded_step_tells_each_time_what_was_called_also_where_a_rank_is_rehearsed(monkeypatch):
    """Which is what recording asks for: it ran on GPUs alone, and nobody had looked there."""
    told = {}

    def opened(job, model, plan, world, *rest, telling):
        told[plan.step_kind] = telling.each
        raise UsageError("seen", "enough")

    monkeypatch.setattr("kway.profiling.sitting.open_on_copy", opened)
    for kind in KINDS:
        with pytest.raises(UsageError, match="seen"):
            Sitting(
                None,
                None,
                Plan("single", {}, ["cpu"], "math", "", step_kind=kind),
                Seat(1, 1, (4,)),
                "cpu",
                None,
                None,
            )
    assert told == {kind.name: kind.records for kind in KINDS.values()}


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(X[place], Y[place]) for place in range(64)])


@pytest.mark.parametrize("level", ["math", "bits", "loose"])
def test_every_level_and_precision_is_profiled(level):
    record = profiled(job(lambda: nn.Linear(8, 4), precision="bf16"), exactness=level)
    assert (record.level, record.precision) == (level, "bf16")
    assert record.timed("eager")


def test_streams_small_data_sets_and_batch_samplers():
    assert profiled(job(data=Stream())).samples is None
    small = profiled(job(batch_size=1000))
    assert small.batch_size == 64
    assert "fewer than a batch of 1000" in small.notices[0]
    batches = DataLoader(Counting(), batch_sampler=[[1, 2, 3], [4, 5, 6, 7]])
    assert profiled(job(data=batches, batch_size=None)).batch_size == 4


def test_shares_that_the_model_cannot_compute_are_left_out():
    # One sample has no variance.
    record = profiled(job(batch_size=4), devices="cpu:1")
    assert [each["samples"] for each in record.timed("eager")] == [2, 4]
    assert any(line.startswith("shares of 1 samples were left out") for line in record.notices)


@pytest.mark.parametrize(("count", "more"), [(1, {"batch_size": 4}), (40, {"batch_size": 1})])
def test_a_batch_that_has_no_statistics_is_the_users_error_in_one_line(count, more):
    with pytest.raises(UsageError, match=r"^a batch of 1 sample, on which .*more than 1 value per channel"):
        profiled(job(data=(X[:count], Y[:count]), **more), devices="cpu:1")


class Greedy(nn.Linear):
    """Needs more memory than there is for more than ``most`` samples at once."""

    most = 8

    def forward(self, x):
        if len(x) > self.most:
            raise torch.OutOfMemoryError(f"out of memory: tried to allocate {len(x)} GiB")
        return super().forward(x)


def test_shares_that_do_not_fit_are_left_out_and_a_device_that_fits_none_is_an_error(monkeypatch):
    record = profiled(job(partial(Greedy, 8, 4)))
    # One device alone cannot hold 16, one of two its 8.
    assert sorted((each["devices"], each["samples"]) for each in record.timed("eager")) == [
        (1, 4),
        (1, 8),
        (2, 4),
        (2, 8),
    ]
    assert "shares of 16 samples were left out" in record.notices[0]
    assert record.flop_per_sample == 2 * 2 * 8 * 4
    monkeypatch.setattr(Greedy, "most", 0)
    with pytest.raises(UsageError, match="no share that fits cpu") as error:
        profiled(job(partial(Greedy, 8, 4)))
    # How much is missing, and what helps: not more ranks, which share the memory.
    assert "4.0 GiB were asked for, " in str(error.value)
    assert "--micro-batch" in str(error.value)
    assert "more devices" not in str(error.value)


class NotCopied(nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("there is one of me")


def test_bad_input_is_one_error(monkeypatch):
    with pytest.raises(UsageError, match="there is one of me"):
        profiled(job(NotCopied(8, 4)))
    with pytest.raises(UsageError, match="seconds=0"):
        kway.profile(job(), seconds=0)
    with pytest.raises(UsageError, match="did you mean 'eager'"):
        profiled(job(), step_kind="eagr")
    with pytest.raises(UsageError, match="needs a CUDA device"):
        profiled(job(), devices="cpu:1", step_kind=["graph"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(UsageError, match="2 ranks that are already there"):
        profiled(job())


@pytest.mark.parametrize("raises", ["forward", "loss"])
def test_what_the_users_code_raises_comes_out_and_nothing_stays_changed(raises):
    model = net()

    def fails(*given):
        raise ZeroDivisionError("mine")

    if raises == "forward":
        model[2].register_forward_hook(fails)
    of = kway.Job(model, fails if raises == "loss" else nn.CrossEntropyLoss(), SGD, (X, Y), batch_size=16)
    seeded()
    with pytest.raises(ZeroDivisionError, match="mine"):
        profiled(of)
    after = drawn()
    seeded()
    assert after == drawn()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("model", [net, lambda: nn.Linear(8, 4)], ids=["dropout", "none"])
def test_a_profile_knows_whether_steps_draw_on_the_cpu(model):
    assert profiled(job(model)).draws_on_cpu == (model is net)


def test_a_profile_beside_busy_programs_says_so(monkeypatch):
    monkeypatch.setattr("kway.devices.busy.taken", lambda usable: "1.8 of 2 processors")
    said = []
    record = profiled(job(), say=said.append)
    assert record.busy == "1.8 of 2 processors"
    for lines in (record.notices, said):
        assert any(line.startswith("other programs keep 1.8 of 2 processors busy") for line in lines)
