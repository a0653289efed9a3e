"""What all ranks do to weights of which each holds a copy: the same draws, the same modes, the loss as it is by now."""

from functools import partial

import pytest
import torch
from torch import nn

import kway

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(26, 5, generator=DRAW, dtype=torch.float64)
Y = torch.randint(3, (26,), generator=DRAW)


class Langevin(torch.optim.SGD):
    """Gradient descent with noise."""

    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-2)


def noisy(model):
    return (model.weight * torch.randn(3, 5, dtype=torch.float64)).sum() * 0.1


def job_of(**more):
    options = {
        "model": partial(nn.Linear, 5, 3), "loss": nn.CrossEntropyLoss(), "data": (X, Y), "batch_size": 13,
        "optimizer": partial(torch.optim.SGD, lr=0.1), "precision": "fp64", "name": "m",
    }  # fmt: skip
    return kway.Job(**{**options, **more})


def stepped(context, job, between, exactness="math"):
    """Take an epoch of steps, with ``between(p)`` after each; return the weights."""
    with kway.parallel(job, strategy="data", exactness=exactness, shards=4) as p:
        for batch in p.batches(0):
            p.step(batch)
            between(p)
        return [parameter.detach().clone() for parameter in p.model.parameters()]


@pytest.mark.parametrize("exactness", ["math", "bits"])
@pytest.mark.parametrize(
    "more", [{"optimizer": partial(Langevin, lr=0.1)}, {"penalty": noisy}], ids=["optimizer", "penalty"]
)
def test_what_optimizer_and_penalty_draw_is_drawn_by_all_ranks(ranks, more, exactness):
    found = [
        weights
        for size in (1, 2, 3)
        for weights in ranks.run(stepped, job_of(**more), lambda p: None, exactness, size=size)
    ]
    for weights in found[1:]:
        for one, other in zip(weights, found[0], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0 if exactness == "bits" else 1e-13)
    # It was drawn: without it the weights are others.
    (plain,) = ranks.run(stepped, job_of(), lambda p: None, exactness, size=1)
    assert not torch.allclose(plain[0], found[0][0], atol=1e-4)


@pytest.mark.parametrize("exactness", ["math", "bits"])
def test_a_loop_may_draw_between_steps(ranks, exactness):
    def reset(p):
        p.model.reset_parameters()

    found = [w for size in (1, 2, 3) for w in ranks.run(stepped, job_of(), reset, exactness, size=size)]
    assert all(torch.equal(a, b) for weights in found for a, b in zip(weights, found[0], strict=True))


def left_elsewhere(context):
    """Draw after a step that leaves each rank's generators where they were, as one that is done by a recording does."""
    with kway.parallel(job_of(), strategy="data") as p:
        run, found = p.engine._runner.run, []

        def replayed(*arguments):
            outcome = run(*arguments)
            torch.manual_seed(p.rank)
            return outcome

        p.engine._runner.run = replayed
        # Before the first step, too.
        found.append(float(torch.rand(())))
        for batch in p.batches(0):
            p.step(batch)
            found.append(float(torch.rand(())))
        return found


def test_what_a_loop_draws_between_steps_does_not_depend_on_how_they_are_taken(ranks):
    one, other = ranks.run(left_elsewhere)
    assert one == other
    assert len(set(one)) == len(one)


class Weighted(nn.Module):
    """A loss with a factor that a loop changes."""

    def __init__(self):
        super().__init__()
        self.beta = 0.0
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

    def forward(self, output, target):
        return self.beta * nn.functional.cross_entropy(output, target, self.scale, reduction="none")


def annealed(context, loss, change):
    with kway.parallel(job_of(loss=loss), strategy="data") as p:
        found = []
        for epoch in range(2):
            change(loss, epoch)
            for batch in p.batches(epoch):
                p.step(batch)
            found.append([parameter.detach().clone() for parameter in p.model.parameters()])
        return found


def more_beta(loss, epoch):
    loss.beta = float(epoch)


def more_smoothing(loss, epoch):
    loss.label_smoothing = 0.4 * epoch


def other_weights(loss, epoch):
    loss.weight[1] = 1.0 + epoch


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("loss", "change"),
    [
        (Weighted, more_beta),
        (nn.CrossEntropyLoss, more_smoothing),
        (lambda: nn.CrossEntropyLoss(torch.ones(3, dtype=torch.float64)), other_weights),
    ],
)
def test_a_loss_that_a_loop_changes_counts_as_it_is(ranks, size, loss, change):
    def constant(epoch):
        made = loss()
        change(made, epoch)
        return made

    found = ranks.run(annealed, loss(), change, size=size)[0]
    fixed = ranks.run(annealed, constant(0), lambda *_: None, size=size)[0]
    assert torch.equal(found[0][0], fixed[0][0])
    assert not torch.allclose(found[1][0], fixed[1][0], atol=1e-5)


class Centred(nn.Module):
    """A loss that moves a centre of its own, with a temperature that a loop changes, by any of its ways."""

    def __init__(self):
        super().__init__()
        self.temperature, self.scales = 1.0, [1.0]
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))

    def forward(self, output, target):
        losses = nn.functional.cross_entropy(
            (output - self.centre) / self.temperature, target, reduction="none"
        )
        self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
        return losses * self.scale * self.scales[0]


def cooler(loss, epoch):
    loss.temperature = 1.0 - 0.3 * epoch


def in_a_list(loss, epoch):
    loss.scales[0] = 1.0 + epoch


def twice_anew(loss, epoch):
    loss.scale = torch.full((1,), 5.0, dtype=torch.float64)
    loss.scale = loss.scale * (1.0 + epoch)


@pytest.mark.parametrize("change", [cooler, in_a_list, twice_anew])
def test_what_a_loss_has_moved_by_itself_stays_when_a_loop_changes_it(ranks, change):
    ((_, found),) = ranks.run(annealed, Centred(), change, size=1)
    loss = Centred()
    weight, bias = ranks.run(stepped_at_first, size=1)[0]
    weight.requires_grad_()
    bias.requires_grad_()
    for epoch in range(2):
        change(loss, epoch)
        for x, y in ranks.run(batches_of, epoch, size=1)[0]:
            mean = loss(x @ weight.T + bias, y).mean()
            for parameter, gradient in zip(
                (weight, bias), torch.autograd.grad(mean, (weight, bias)), strict=True
            ):
                parameter.data.sub_(gradient, alpha=0.1)
    torch.testing.assert_close(found, [weight.detach(), bias.detach()], rtol=0, atol=1e-12)


def stepped_at_first(context):
    with kway.parallel(job_of(), strategy="data") as p:
        return [parameter.detach().clone() for parameter in p.model.parameters()]


def batches_of(context, epoch):
    with kway.parallel(job_of(), strategy="data") as p:
        return [(X[batch.indices], Y[batch.indices]) for batch in p.batches(epoch)]


class Merged(nn.Module):
    """Adds what it trains to a fixed weight in evaluation, and takes it out again by its own way to train."""

    def __init__(self):
        super().__init__()
        self.fixed = nn.Linear(5, 3)
        self.fixed.requires_grad_(False)
        self.more, self.merged = nn.Parameter(torch.zeros(3, 5)), False

    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode:
            self.fixed.weight.data.add_(self.more.data, alpha=-1.0 if mode else 1.0)
            self.merged = not mode
        return self

    def forward(self, x):
        return self.fixed(x) if self.merged else self.fixed(x) + x @ self.more.T


@pytest.mark.parametrize("size", [1, 2])
def test_a_validation_changes_nothing_for_layers_with_a_way_of_their_own_to_train(trained, size):
    job = job_of(model=Merged, validation=(X, Y))
    found = trained(job, size, epochs=3)
    plain = trained(job_of(model=Merged), size, epochs=3)
    torch.testing.assert_close(found.model.more, plain.model.more, rtol=0, atol=1e-13)
    assert found.model.more.abs().max() > 1e-3


class Unsure(nn.Module):
    """Drops in evaluation, too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(nn.functional.dropout(x, 0.5, True))


def test_at_bits_what_a_model_draws_in_evaluation_is_the_same_on_any_number_of_devices(trained):
    job = job_of(model=Unsure, validation=(X[:11], Y[:11]))
    runs = [trained(job, size, exactness="bits", shards=4, epochs=2) for size in (1, 2, 3)]
    assert len({row["validation_loss"] for run in runs for row in run.record.epochs[1:]}) == 1
    assert len({run.record.weights_sha256 for run in runs}) == 1


def test_a_loop_may_draw_after_an_evaluation(ranks):
    def noise(p):
        p.evaluate()
        with torch.no_grad():
            p.model.layer.weight.add_(torch.randn_like(p.model.layer.weight), alpha=0.1)

    job = job_of(model=Unsure, validation=(X[:5], Y[:5]))
    first, *others = ranks.run(stepped, job, noise, size=3)
    assert all(torch.equal(a, b) for weights in others for a, b in zip(weights, first, strict=True))


@pytest.mark.parametrize("size", [1, 2])
def test_a_callback_that_changes_the_loss_changes_nothing_on_any_number_of_devices(trained, size):
    loss, plain = Weighted(), Weighted()
    loss.beta = plain.beta = 1.0

    def change(event, record):
        loss.beta = 0.0

    changed = trained(job_of(loss=loss), size, callbacks=[change])
    assert changed.record.weights_sha256 == trained(job_of(loss=plain), size).record.weights_sha256


def frozen_norm():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[1].eval()
    return model


@pytest.mark.parametrize("size", [1, 2])
def test_a_layer_that_the_factory_sets_to_evaluation_stays_so(trained, size):
    run = trained(job_of(model=frozen_norm), size)
    assert run.model[1].running_mean.eq(0).all()
    whole = trained(job_of(model=lambda: frozen_norm().eval()), size)
    assert whole.model[1].running_mean.ne(0).any()


def test_a_proof_has_such_layers_as_they_are(ranks):
    assert kway.prove(job_of(model=frozen_norm), devices="1,2", steps=2, ranks=ranks).verdict == "pass"


def by_frequency():
    return nn.Sequential(nn.EmbeddingBag(5, 4, scale_grad_by_freq=True), nn.Linear(4, 3)).double()


@pytest.mark.parametrize(
    ("size", "more", "options"),
    [(2, {}, {}), (1, {"micro_batch": 3}, {}), (1, {}, {"exactness": "bits", "shards": 2})],
    ids=["devices", "micro-batches", "shards"],
)
def test_gradients_by_frequency_are_refused_where_a_batch_is_cut(size, more, options):
    tokens = torch.randint(5, (26, 6), generator=DRAW)
    job = job_of(model=by_frequency, data=(tokens, Y), **more)
    with pytest.raises(kway.RefusedError, match="scale_grad_by_freq"):
        kway.train(job, devices=f"cpu:{size}", epochs=1, echo=False, **options)


def masked(output, target):
    losses = nn.functional.cross_entropy(output, target, reduction="none")
    mask = (target > 0).to(losses.dtype)
    return (losses * mask).sum(), mask.sum()


@pytest.mark.parametrize("exactness", ["math", "bits"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("label", "loss"),
    [
        (-100, nn.CrossEntropyLoss()),
        (0, nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))),
        (0, masked),
    ],
    ids=["ignored", "class weight 0", "mask"],
)
def test_a_batch_of_which_nothing_counts_moves_nothing(ranks, size, exactness, label, loss):
    job = job_of(data=(X, torch.full_like(Y, label)), loss=loss)
    for weights in ranks.run(stepped, job, lambda p: None, exactness, size=size):
        assert all(weight.isfinite().all() for weight in weights)
