"""Memory that runs out in each kind of job, and runs that go on with fewer samples at once."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.data.order import KeyedOrder
from kway.jobs.adapting import adapting_of
from kway.jobs.place import Place, place
from kway.world import World

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(22, 3, generator=G), torch.arange(22) % 4
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB"
BATCH = 8


class Greedy(nn.Module):
    """Has no room for more than ``most`` samples at once, ``when`` it trains or not, in one of ``ways``."""

    def __init__(self, most=3, when="train", way="torch", only=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.2), nn.Linear(6, 4))
        self.most, self.when, self.way, self.only = most, when, way, only

    def forward(self, x):
        at = self.only is None or bool((x == self.only).all(1).any())
        if len(x) > self.most and self.training == (self.when == "train") and at:
            if self.way == "torch":
                raise torch.OutOfMemoryError(FULL)
            torch.empty(2**62, dtype=torch.uint8)
        return self.net(x)


class Hungry(torch.optim.SGD):
    """Has no room for its own step."""

    def step(self, closure=None):
        raise torch.OutOfMemoryError(FULL)


def job_of(**more):
    given = {
        "model": Greedy,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=0.05),
        "data": (X, Y),
        "validation": (X[:7], Y[:7]),
        "batch_size": BATCH,
        **more,
    }
    return kway.Job(**given)


def train(ranks, size, job, **more):
    # A step kind that is named: runs that are compared must not be tuned, each by itself.
    given = {"epochs": 2, "step_kind": "eager", **more}
    return kway.train(job, devices=f"cpu:{size}", ranks=ranks, echo=False, **given)


def fails(ranks, size, job, **more):
    with pytest.raises(kway.OutOfMemoryError) as caught:
        train(ranks, size, job, **more)
    return caught.value


@pytest.mark.parametrize(("size", "way"), [(1, "real"), (2, "torch"), (2, "real")])
def test_one_clear_error_with_what_was_there(ranks, size, way):
    error = fails(ranks, size, job_of(model=partial(Greedy, way=way)))
    # Shares of 8 samples: 4 on each of two ranks.
    assert (error.phase, error.samples, error.device) == ("forward", BATCH // size, "cpu")
    assert error.memory["asked"] == (2**62 if way == "real" else 2 << 30)
    assert error.memory["weights"] == 4 * (3 * 6 + 6 + 6 * 4 + 4)
    assert error.memory["input"] >= X.nbytes + Y.nbytes
    text = str(error)
    assert (
        f"rank {error.rank} (cpu) ran out of memory in epoch 1, step 1 (forward, test_out_of_memory.py:"
        in text
    )
    assert f"{BATCH // size} samples at once of a global batch of 8" in text
    assert f"micro_batch={BATCH // size // 2} (--micro-batch {BATCH // size // 2})" in text
    assert "--on-oom adapt" in text


@pytest.mark.parametrize(("size", "most", "found"), [(1, 3, 2), (2, 1, 1)])
def test_adapting_gives_the_weights_of_a_run_that_began_so(ranks, size, most, found):
    heard = []
    model = partial(Greedy, most)
    callbacks = [lambda event, record: heard.append((event, record))]
    run = train(ranks, size, job_of(model=model), on_oom="adapt", callbacks=callbacks)
    assert run.record.job["micro_batch"] == found
    own = train(ranks, size, job_of(model=model, micro_batch=found))
    assert run.record.weights_sha256 == own.record.weights_sha256
    assert [row["train_loss"] for row in run.epochs] == [row["train_loss"] for row in own.epochs]
    assert run.record.batch_size == BATCH
    said = [record["text"] for event, record in heard if event == "warning"]
    assert any("samples at once of a global batch of 8: 2.0 GiB were asked for" in text for text in said)
    assert any(f"from now on micro_batch={found}" in text for text in said)
    assert {text for text in said if "from now on" in text} <= set(run.record.notices)


def test_adapting_goes_on_from_the_last_complete_checkpoint(ranks, tmp_path):
    model = partial(Greedy, most=4, only=X[17])
    job = job_of(model=model, shuffle=False)
    run = train(ranks, 1, job, on_oom="adapt", checkpoint_every="1steps", out=tmp_path / "run")
    assert run.record.resumed_from_step == 2
    # Its batch is the last and has 6 samples.
    assert run.record.job["micro_batch"] == 4
    assert any("micro_batch none, now 4" in text for text in run.record.notices)
    begun = tmp_path / "run" / "checkpoints" / "step-2"
    own = train(
        ranks, 1, job_of(model=model, shuffle=False, micro_batch=4), resume=begun, out=tmp_path / "own"
    )
    assert run.record.weights_sha256 == own.record.weights_sha256


def test_adapting_goes_on_from_what_was_computed_whoever_chose_it(ranks):
    model = partial(Greedy, most=2)
    heard = []
    callbacks = [lambda event, record: heard.append(record.get("text", ""))]
    settings = {"micro_batch": 4}
    run = train(ranks, 1, job_of(model=model), on_oom="adapt", settings=settings, callbacks=callbacks)
    said = [text for text in heard if "from now on" in text]
    assert ["micro_batch=2" in text for text in said] == [True]
    assert run.record.job["micro_batch"] == 2
    assert train(ranks, 1, job_of(model=partial(Greedy, 4)), settings=settings).record.job["micro_batch"] == 4


def test_an_adapted_run_measures_nothing_and_misses_no_checkpoint_that_nobody_asked_for(ranks, tmp_path):
    heard = []
    given = {"step_kind": "auto", "callbacks": [lambda event, record: heard.append(record.get("text", ""))]}
    run = train(ranks, 1, job_of(), on_oom="adapt", out=tmp_path / "run", **given)
    assert (run.record.tuned["how"], "started again" in run.record.tuned["why"]) == ("left", True)
    assert "goes on from the beginning" in heard
    assert not any("no complete checkpoint" in text for text in heard)


def test_a_run_that_is_not_adapted_leaves_its_checkpoint(ranks, tmp_path):
    job = job_of(model=partial(Greedy, most=4, only=X[17]), shuffle=False)
    fails(ranks, 1, job, checkpoint_every="1steps", out=tmp_path / "run")
    other = job_of(model=partial(Greedy, most=8), shuffle=False)
    run = train(ranks, 1, other, resume=True, checkpoint_every="1steps", out=tmp_path / "run")
    assert run.record.resumed_from_step == 2


def test_one_sample_at_once_is_the_end_of_it(ranks):
    error = fails(ranks, 2, job_of(model=partial(Greedy, 0)), on_oom="adapt")
    assert error.samples == 1
    assert "tries no smaller micro-batch" in str(error)
    assert "no fewer samples can be computed at once than 1" in str(error)


def test_fewer_samples_do_not_help_an_optimizer(ranks):
    started = []
    job = job_of(model=partial(Greedy, 99), optimizer=partial(Hungry, lr=0.1))
    error = fails(
        ranks, 1, job, on_oom="adapt", callbacks=[lambda event, _: started.append(event == "start")]
    )
    assert sum(started) == 1
    assert error.phase == "update"
    assert "foreach=False" in str(error)
    assert "micro_batch=" not in str(error)


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError(FULL)


class Deep(nn.Linear):
    """Has no room for gradients of more than two samples at once."""

    def forward(self, x):
        y = super().forward(x)
        return InBackward.apply(y) if len(x) > 2 else y


class Heavy(nn.Linear):
    """Has no room for its weights on a device."""

    def to(self, *args, **kwargs):
        raise torch.OutOfMemoryError(FULL)


def test_what_a_run_was_at_decides_whether_it_is_adapted(ranks):
    backward = job_of(model=partial(Deep, 3, 4), validation=None)
    assert fails(ranks, 2, backward).phase == "backward"
    assert train(ranks, 2, backward, on_oom="adapt").record.job["micro_batch"] == 2
    start = fails(ranks, 1, job_of(model=partial(Heavy, 3, 4)), on_oom="adapt")
    assert start.phase == "start"
    assert "before the first step" in str(start)
    assert "of no use in: start" in str(start)


def test_validation_is_adapted_too(ranks):
    model = partial(Greedy, 2, "evaluate")
    assert fails(ranks, 2, job_of(model=model)).phase == "evaluation"
    run = train(ranks, 2, job_of(model=model), on_oom="adapt")
    assert run.record.job["micro_batch"] == 2
    assert (
        run.record.weights_sha256 == train(ranks, 2, job_of(model=model, micro_batch=2)).record.weights_sha256
    )


def normalised(kind):
    return nn.Sequential(nn.Linear(3, 6), kind, nn.Linear(6, 4))


@pytest.mark.parametrize(
    ("level", "layer", "reason"),
    [
        ("bits", nn.Tanh(), "the shards are the micro-batches"),
        ("math", nn.BatchNorm1d(6), "the statistics of the global batch cannot be had"),
        ("loose", nn.BatchNorm1d(6), "in place of those of a device's share"),
        ("loose", nn.InstanceNorm1d(6, track_running_stats=True), "at math it moves once a step"),
    ],
)
def test_what_would_be_another_result_is_refused_before_anything_starts(tmp_path, level, layer, reason):
    job = job_of(model=normalised(layer))
    with pytest.raises(kway.RefusedError, match=reason):
        kway.train(job, devices="cpu", exactness=level, on_oom="adapt", out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


class Part(nn.Module):
    """A block that a batch must not be cut for."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())

    def forward(self, x):
        return x + self.layers(x)


class Keeping(nn.Module):
    """Has no room for what its blocks keep for backward, of more than ``most`` samples, nor ``ever`` for so many."""

    def __init__(self, most=3, ever=99):
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 4)
        self.parts = nn.ModuleList(Part() for _ in range(2))
        self.most, self.ever = most, ever

    def forward(self, x):
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        again = "forward" in vars(self.parts[0])
        if self.training and len(x) > (self.ever if again else self.most):
            raise torch.OutOfMemoryError(FULL)
        return self.last(x)


@pytest.mark.parametrize(("size", "level"), [(1, "math"), (2, "math"), (2, "loose"), (2, "bits")])
def test_a_share_that_must_not_be_cut_is_computed_again_in_backward(ranks, size, level):
    heard, more = [], {"exactness": level, "shards": 2}
    callbacks = [lambda event, record: heard.append(record.get("text", ""))]
    run = train(ranks, size, job_of(model=Keeping), on_oom="adapt", callbacks=callbacks, **more)
    assert (run.record.settings, run.record.job["micro_batch"]) == ({"recompute": True}, None)
    # Adapting too, so that one device is a rank of as many threads.
    own = train(ranks, size, job_of(model=partial(Keeping, 99)), on_oom="adapt", **more)
    assert own.record.settings == {}
    assert run.record.weights_sha256 == own.record.weights_sha256
    said = [text for text in heard if "from now on" in text]
    assert ["recompute=true (activation checkpointing of 2 blocks)" in text for text in said] == [True]
    assert set(said) <= set(run.record.notices)
    assert (
        "of the model's 2 blocks by settings={'recompute': True} (--settings recompute=true); on_oom='adapt'"
        in str(fails(ranks, size, job_of(model=Keeping), **more))
    )


def test_fewer_samples_come_before_recomputing_and_what_is_named_stays(ranks):
    def plain():
        model = Keeping(most=0, ever=1)
        for part in model.parts:
            part.layers[1] = nn.Identity()
        return model

    run = train(ranks, 2, job_of(model=plain), on_oom="adapt")
    assert (run.record.settings, run.record.job["micro_batch"]) == ({"recompute": True}, 1)
    error = fails(ranks, 2, job_of(model=plain), on_oom="adapt", settings={"recompute": False})
    assert "1 sample at once is the fewest" in str(error)
    with pytest.raises(kway.RefusedError, match="recompute=False is named"):
        train(ranks, 2, job_of(model=Keeping), on_oom="adapt", settings={"recompute": False})


def test_where_recomputing_is_not_enough_the_error_says_that_it_was_tried(ranks):
    error = fails(ranks, 2, job_of(model=partial(Keeping, 3, 3)), on_oom="adapt")
    assert "tries nothing more: a share must not be cut" in str(error)
    assert "activation checkpointing within the blocks" in str(error)
    assert "the model's blocks are computed again already" in str(error)
    assert "does so with its" not in str(error)
    wrapped = Keeping()
    for part in wrapped.parts:
        part.forward = partial(part.forward)
    with pytest.raises(kway.RefusedError, match="no blocks that could be computed again"):
        train(ranks, 2, job_of(model=wrapped), on_oom="adapt")


def test_loose_models_without_statistics_of_a_batch_are_adapted(ranks):
    run = train(ranks, 1, job_of(), on_oom="adapt", exactness="loose")
    assert run.record.job["micro_batch"] == 2


class Cleared(Greedy):
    """Clears gradients as it goes, which with micro-batches loses those before: refused in the first step."""

    def forward(self, x):
        for parameter in self.parameters():
            parameter.grad = None
        return super().forward(x)


def test_a_cut_that_a_step_refuses_is_told_with_the_error_that_led_to_it(ranks):
    error = fails(ranks, 1, job_of(model=partial(Cleared, 4)), on_oom="adapt")
    assert error.samples == BATCH
    assert "tried micro_batch=4, which is refused: a forward pass that clears" in str(error)


def test_other_words_are_refused():
    with pytest.raises(kway.UsageError, match="unknown on_oom 'retry'"):
        kway.train(job_of(), devices="cpu", on_oom="retry")


def test_ranks_that_another_launcher_started_are_not_started_again():
    where = place("cpu:2")
    joined = Place(where.plan, 1, World(1, 2, 1, 2))
    order = KeyedOrder(22, BATCH, seed=0)
    with pytest.raises(kway.UsageError, match="only who starts the ranks"):
        adapting_of("adapt", job_of(), Greedy(), joined, order)


@pytest.mark.parametrize("size", [1, 2])
def test_evaluations_and_predictions_say_so_as_well(spread, size):
    job = job_of(model=partial(Greedy, 3, "evaluate"))
    for call in (kway.evaluate, kway.predict):
        with pytest.raises(kway.OutOfMemoryError, match="in batch 1 of an evaluation") as caught:
            call(job, devices=f"cpu:{size}")
        assert "batch_size" in caught.value.do
        assert "micro_batch" not in caught.value.do


def test_proofs_say_so_as_well(ranks):
    with pytest.raises(kway.OutOfMemoryError, match="in the reference of a proof"):
        kway.prove(job_of(), devices="cpu:1", ranks=ranks)
    # Each of two ranks computes 4 samples, which only kway's own step has no room for.
    apart = job_of(model=partial(Greedy, 99), metrics={}, loss=Short())
    with pytest.raises(kway.OutOfMemoryError, match=r"\(cpu\) ran out of memory in epoch 1, step 1"):
        kway.prove(apart, devices="cpu:2", ranks=ranks)


class Short(nn.Module):
    """Has room for whole batches only, of which the smallest has 6 samples."""

    def forward(self, output, target):
        if len(output) < 5:
            raise torch.OutOfMemoryError(FULL)
        return nn.functional.cross_entropy(output, target)


def test_a_loop_of_the_users_own_hears_of_it_and_can_go_on():
    job = job_of(model=partial(Greedy, 3, only=X[2]), shuffle=False)
    with kway.parallel(job, devices="cpu") as p:
        for number, batch in enumerate(p.batches(0)):
            if number == 0:
                with pytest.raises(kway.OutOfMemoryError, match="8 samples at once"):
                    p.step(batch)
            else:
                assert torch.isfinite(p.step(batch))


def test_data_that_finds_no_room_is_told_of_the_machine():
    class Wide(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise MemoryError("Unable to allocate 3.00 TiB for an array with shape (3,)")

    with pytest.raises(kway.OutOfMemoryError, match="while batches were read") as caught:
        kway.train(job_of(data=Wide(), validation=None), devices="cpu", epochs=1)
    assert caught.value.phase == "input"
    assert caught.value.memory["asked"] == 3 << 40
