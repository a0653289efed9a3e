"""Every axis on several ranks gives what a plain loop of torch gives: weights, losses, and kway's own proof."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import kway
from kway.data.order import KeyedOrder
from kway.strategies.layout import axes

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
EPOCHS = 2


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def convolution():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(27), nn.Linear(27, 4)
    )


class Words(nn.Module):
    """Tokens (N, L) to logits (N, classes, L), the input and output tables tied."""

    def __init__(self, tied):
        super().__init__()
        self.table, self.out = nn.Embedding(7, 4), nn.Linear(4, 7)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, tokens):
        return self.out(torch.tanh(self.table(tokens))).transpose(1, 2)


class Named(nn.Module):
    """Takes its inputs by name."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, left, right):
        return self.first(left) * self.second(right)


def weight_decay(model):
    return 0.05 * sum(p.square().sum() for p in model.parameters())


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


@dataclass(frozen=True)
class Setting:
    """A job, and how plain torch computes its loss on one batch."""

    model: Callable[[], nn.Module]
    data: Any
    loss: Any
    batch: int
    plain: Callable[[nn.Module, Any], torch.Tensor]
    more: dict[str, Any] = field(default_factory=dict)


LABELS = torch.tensor(
    [[1, -100, 2, -100, 5]] * 5 + [[-100] * 5] * 2 + [[3, 0, 6, 6, 6], [-100, -100, 4, -100, -100]] * 3
)
CLASSES = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 0.1], dtype=torch.float64)
CE = nn.CrossEntropyLoss(weight=CLASSES, ignore_index=-100, label_smoothing=0.1)
TOKENS = torch.arange(65).view(13, 5) % 7
NAMED = {"left": draw(11, 2), "right": draw(11, 3, seed=1), "label": torch.arange(11) % 3}


def of_pair(loss):
    return lambda model, batch: loss(model(batch[0]), batch[1])


SETTINGS = {
    "linear": Setting(linear, (draw(13, 3), draw(13, 2, seed=1)), nn.MSELoss(), 5, of_pair(nn.MSELoss())),
    "norm": Setting(
        convolution, (draw(13, 1, 5, 5), torch.arange(13) % 4), nn.CrossEntropyLoss(), 7,
        of_pair(nn.CrossEntropyLoss()),
    ),
    "tokens": Setting(partial(Words, False), (TOKENS, LABELS), CE, 5, of_pair(CE)),
    "tied": Setting(partial(Words, True), (TOKENS, LABELS), CE, 7, of_pair(CE)),
    "named": Setting(
        Named, NAMED, nn.CrossEntropyLoss(), 4,
        lambda model, batch: nn.functional.cross_entropy(model(batch["left"], batch["right"]), batch["label"]),
    ),
    "everything": Setting(
        linear, (draw(13, 3), draw(13, 2, seed=1)), nn.SmoothL1Loss(), 5,
        lambda model, batch: nn.functional.smooth_l1_loss(model(batch[0]), batch[1]) + weight_decay(model),
        {"penalty": weight_decay, "clip": 0.3, "micro_batch": 1, "schedule": halving},
    ),
}  # fmt: skip


def rows(data, indices):
    if isinstance(data, dict):
        return {name: value[indices] for name, value in data.items()}
    return tuple(value[indices] for value in data)


def plain_loop(setting, seed):
    """Train on one device, by hand; return the weights."""
    torch.manual_seed(seed)
    model = setting.model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = halving(optimizer) if "schedule" in setting.more else None
    samples = len(next(iter(setting.data.values())) if isinstance(setting.data, dict) else setting.data[0])
    order = KeyedOrder(samples, setting.batch, seed)
    for epoch in range(EPOCHS):
        for step in range(order.steps(epoch)):
            loss = setting.plain(model, rows(setting.data, torch.from_numpy(order.batch(epoch, step))))
            optimizer.zero_grad()
            loss.backward()
            if "clip" in setting.more:
                nn.utils.clip_grad_norm_(model.parameters(), setting.more["clip"])
            optimizer.step()
            if schedule is not None:
                schedule.step()
    return model.state_dict()


def job_of(setting, **more):
    return kway.Job(
        model=setting.model,
        loss=setting.loss,
        optimizer=MOMENTUM,
        data=setting.data,
        batch_size=setting.batch,
        **{"precision": "fp64", "seed": 5, **setting.more, **more},
    )


@pytest.mark.parametrize("axis", ["single", *axes()])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_trained_weights_are_those_of_a_loop_by_hand(ranks, axis, size, name):
    if axis == "single" and size > 1:
        pytest.skip("single is one device")
    setting = SETTINGS[name]
    weights = plain_loop(setting, 5)
    job = job_of(setting)
    strategy = {"strategy": axis, "devices": f"cpu:{size}"}
    run = kway.train(job, **strategy, epochs=EPOCHS, ranks=ranks, echo=False)
    own = run.model.state_dict()
    assert list(own) == list(weights)
    for key, value in weights.items():
        torch.testing.assert_close(
            own[key], value, rtol=0, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("axis", axes())
@pytest.mark.parametrize(
    ("name", "precision"), [*((name, "fp32") for name in SETTINGS), ("norm", "fp64"), ("everything", "fp64")]
)
def test_the_proof_holds(ranks, axis, precision, name):
    setting = SETTINGS[name]
    data = copy.deepcopy(setting.data)
    if precision == "fp32":
        pairs = data.items() if isinstance(data, dict) else enumerate(data)
        single = [(key, value.float() if value.is_floating_point() else value) for key, value in pairs]
        data = dict(single) if isinstance(data, dict) else tuple(value for _, value in single)
    job = job_of(setting, precision=precision)
    job = kway.Job(**{**vars(job), "data": data})
    if precision == "fp32" and setting.loss is CE:
        loss = nn.CrossEntropyLoss(weight=CLASSES.float(), ignore_index=-100, label_smoothing=0.1)
        job = kway.Job(**{**vars(job), "loss": loss})
    proof = kway.prove(job, devices="1,2,3,4", strategy=axis, precision=precision, ranks=ranks, echo=False)
    assert [row["devices"] for row in proof.candidates] == [1, 2, 3, 4]
    assert proof.verdict == "pass", [(row["equal"], row["reason"]) for row in proof.candidates]
    assert all(row["tensors"] > 10 for row in proof.candidates)
    for row in proof.candidates:
        assert all(len(shares) == row["devices"] for shares in row["shares"])
