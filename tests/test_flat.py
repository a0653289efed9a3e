"""The numbers of any tensor as one vector whose bytes can be looked at."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.checkpoints.reading import open_checkpoint
from kway.flat import flat


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3),
        torch.randn(3, 2).t(),
        torch.randn(8)[::2],
        torch.randn(8)[::8],
        torch.ones(1, 6, dtype=torch.complex64)[:, ::6],
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1 + 2j, 3j]).conj().imag,
        torch.ones(1).expand(3),
        torch.tensor(2, dtype=torch.int16),
        torch.empty(0, 2),
    ],
)
def test_it_holds_the_numbers_in_order_and_lies_without_gaps(tensor):
    vector = flat(tensor)
    assert vector.tolist() == tensor.reshape(-1).tolist()
    assert vector.stride() == (1,)
    assert vector.view(torch.uint8).numel() == tensor.numel() * tensor.element_size()


def test_it_is_a_view_where_there_is_one():
    weight = nn.Parameter(torch.zeros(2, 2))
    flat(weight)[3] = 7
    assert weight[1, 1] == 7


class Odd(nn.Module):
    """One number of it has the stride of a view with gaps."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.one = nn.Parameter(torch.ones(1, 8)[:, ::8])

    def forward(self, x):
        return self.layer(x) * self.one


def test_a_single_number_of_any_stride_is_trained_saved_gone_on_with_and_proved(ranks, tmp_path):
    job = kway.Job(
        model=Odd, loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(torch.rand(8, 3), torch.arange(8) % 2), batch_size=4,
    )  # fmt: skip
    options = {"ranks": ranks, "strategy": "data", "devices": "cpu:2", "echo": False}
    whole = kway.train(job, epochs=2, **options)
    assert float(whole.model.one.detach()) != 1
    first = kway.train(job, epochs=1, checkpoint_every="1steps", out=tmp_path / "run", **options)
    assert first.record.checkpoints["failed"] == 0
    assert open_checkpoint(tmp_path / "run/checkpoints/step-2").weights()["one"].shape == (1, 1)
    again = kway.train(job, epochs=2, resume=tmp_path / "run", out=tmp_path / "again", **options)
    assert again.record.weights_sha256 == whole.record.weights_sha256
    assert kway.prove(job, devices="cpu:1", echo=False).verdict == "pass"
