"""Every setting that tuning may choose is proved on a GPU, and tuning works there."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.devices.compilers import missing
from kway.zoo import get

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing("cuda") is not None, reason=f"torch.compile: {missing('cuda')}"),
]
SETTINGS = [
    {"memory_format": "channels_last"},
    {"memory_format": "contiguous", "optimizer": "foreach"},
    {"optimizer": "fused", "autotune": True},
    {"compile_mode": "searched"},
    {"bucket_mib": 0.05, "overlap": True},
]


def job(**more):
    draw = torch.Generator().manual_seed(2)
    data = torch.rand(96, 1, 28, 28, generator=draw), torch.randint(10, (96,), generator=draw)
    return kway.Job(
        **{
            "model": partial(get("lenet"), (1, 28, 28), 10),
            "loss": nn.CrossEntropyLoss(),
            "optimizer": partial(torch.optim.SGD, lr=0.1),
            "data": data,
            "batch_size": 16,
            **more,
        }
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_setting_on_one_gpu_is_proved_against_plain_torch(one, settings):
    proof = kway.prove(job(), devices=one, step_kind="compiled-graph", settings=settings, precision="fp32")
    assert proof.verdict == "pass", str(proof)


@pytest.mark.timeout(300)
def test_code_in_pieces_on_two_gpus_is_proved(one, two):
    settings = {"bucket_mib": 0.05}
    proof = kway.prove(job(), devices=f"{one} {two}", step_kind="compiled-graph", settings=settings)
    assert proof.verdict == "pass", str(proof)


@pytest.mark.timeout(300)
def test_attention_of_cudnn_computes_the_same(one):
    """At bf16 no proof: losses of the same steps lie within its rounding."""
    tokens = torch.randint(256, (32, 65), generator=torch.Generator().manual_seed(1))
    data = tokens[:, :-1], tokens[:, 1:]
    model = partial(get("gpt"), (64,), 256, size="1m")
    text = job(
        model=model, data=data, precision="bf16", optimizer=partial(torch.optim.AdamW, lr=1e-3), batch_size=8
    )
    runs = [
        kway.train(text, devices=one, epochs=2, step_kind="graph", settings={"attention": name})
        for name in ("default", "cudnn")
    ]
    losses = [[row["train_loss"] for row in run.epochs] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.timeout(300)
def test_tuning_on_a_gpu_finds_something_faster_than_eager_steps(one, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    record = kway.tune(job(), devices=one, seconds=90)
    assert record.how == "measured"
    assert record.choice["step_kind"] in ("graph", "compiled-graph"), record.rows
    assert not [row for row in record.rows if row["verdict"].startswith("refused")], record.rows
    run = kway.train(job(), devices=one, epochs=3)
    assert run.record.step_kind == record.choice["step_kind"]
