"""The recipe of examples/fashion_mnist.py: its crops, its bits, what it says at the end."""

from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
from examples.fashion_mnist import CropAndFlip, cropped, network, optimizer, reached, summary
from torch import nn

import kway
from examples import fashion_mnist
from kway.step.observe import OperationLog

# No other process can import a file of examples/: what it defines travels by value, as from a script.
fashion_mnist.__kway_by_value__ = True

G = torch.Generator().manual_seed(0)
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def by_padding(image, down, right, mirrored, padding):
    """Crop one image, (C, H, W), the usual way: a border of zeros, a window, a flip."""
    _, height, width = image.shape
    bordered = nn.functional.pad(image, (padding,) * 4)
    window = bordered[:, down + padding :, right + padding :][:, :height, :width]
    return window.flip(2) if mirrored else window


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_every_crop_is_the_window_that_padding_would_give(dtype, layout):
    moves = list(product(range(-3, 4), range(-3, 4), [False, True]))
    images = torch.randint(1, 255, (len(moves), 2, 5, 4), generator=G).to(dtype).to(memory_format=layout)
    down, right, mirrored = (torch.tensor(column) for column in zip(*moves, strict=True))
    got = cropped(images, down, right, mirrored)
    assert (got.dtype, got.stride()) == (dtype, images.stride())
    assert torch.equal(got, torch.stack([by_padding(i, *m, 3) for i, m in zip(images, moves, strict=True)]))


def test_every_crop_is_as_likely_as_any_other():
    image, count = torch.arange(1.0, 13).view(1, 3, 4), 3600
    expected = [by_padding(image, *move, 1) for move in product((-1, 0, 1), (-1, 0, 1), (False, True))]
    torch.manual_seed(0)
    found = Counter(map(tuple, CropAndFlip(1)(image.expand(count, 1, 3, 4)).flatten(1).tolist()))
    assert set(found) == {tuple(crop.flatten().tolist()) for crop in expected}
    mean = count / 18
    # Of 18 binomial counts one is five deviations away once in 100,000 times.
    assert all(abs(times - mean) < 5 * (mean * 17 / 18) ** 0.5 for times in found.values())


def test_evaluation_sees_images_as_they_are_and_draws_nothing():
    images, before = torch.rand(4, 1, 6, 6, generator=G), torch.default_generator.get_state()
    assert CropAndFlip().eval()(images) is images
    assert torch.equal(torch.default_generator.get_state(), before)


def test_a_step_does_the_same_operations_whatever_is_drawn():
    logs = [OperationLog(), OperationLog()]
    for log in logs:
        with log:
            CropAndFlip()(torch.rand(4, 1, 6, 6))
    assert len(logs[0].operations) > 5
    assert logs[0].difference(logs[1]) is None


def test_compiled_as_one_graph_it_gives_what_it_gives_eagerly():
    layer, images = CropAndFlip(), torch.rand(8, 1, 6, 6, generator=G)
    # Without code of its own for random numbers the compiler draws as torch does, and can be compared.
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    results = []
    for call in (layer, compiled):
        torch.manual_seed(3)
        results.append([call(images), call(images)])
    assert all(map(torch.equal, *results))
    assert not torch.equal(*results[0])


def small():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, 2)
    )


def small_augmented():
    return nn.Sequential(CropAndFlip(1), small())


X = torch.rand(44, 1, 6, 6, generator=G)
Y = (X[:, 0, :, 2:4].mean((1, 2)) > 0.5).long()


def job(model=small_augmented, **more):
    more = {"data": (X, Y), "validation": (X, Y), "batch_size": 16, **more}
    return kway.Job(
        model,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        partial(optimizer, lr=0.1, decay=5e-4),
        schedule=partial(
            torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=6, cycle_momentum=False
        ),
        **more,
    )


def test_at_bits_the_crops_and_all_that_follows_are_the_same_on_two_devices(ranks):
    one, two = (
        kway.train(
            job(), devices=f"cpu:{size}", strategy="data", exactness="bits", shards=4, epochs=2, ranks=ranks
        )
        for size in (1, 2)
    )
    assert one.record.weights_sha256 == two.record.weights_sha256
    assert one.epochs[-1]["validation_loss"] == two.epochs[-1]["validation_loss"]
    # Without crops it is another training: they were there.
    other = kway.train(job(small), devices="cpu:1", exactness="bits", shards=4, epochs=2)
    assert other.epochs[-1]["validation_loss"] != one.epochs[-1]["validation_loss"]


@pytest.mark.parametrize(("model", "verdict"), [(small, "pass"), (small_augmented, "fail")])
def test_it_is_proved_without_the_crops(ranks, model, verdict):
    proof = kway.prove(job(model), devices="1,2", steps=2, ranks=ranks)
    assert proof.verdict == verdict, str(proof)
    # What a plain loop draws beside kway is something else: there is nothing to compare with, and the proof says so.
    assert ("draws random numbers" in str(proof)) == (verdict == "fail")


def test_biases_and_scales_do_not_decay():
    model = network((1, 8, 8), 10)
    made = optimizer(model.named_parameters(), lr=0.1, decay=0.5)
    decay = {id(p): group["weight_decay"] for group in made.param_groups for p in group["params"]}
    assert {name for name, p in model.named_parameters() if decay[id(p)] == 0.5} == {
        f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)
    }
    assert len(decay) == len([*model.parameters()])


def test_when_a_target_was_reached_counts_the_seconds_of_all_epochs_before():
    rows = [
        {"epoch": number, "accuracy": accuracy, "seconds": seconds}
        for number, (accuracy, seconds) in enumerate([(0.5, 9.0), (0.945, 1.0), (0.95, 1.5), (0.94, 1.0)], 1)
    ]
    assert reached(rows, 0.945) == (2, 10.0)
    assert reached(rows, 0.951) is None
    text = summary(rows, 0.945)
    assert "last epoch  accuracy 0.9400" in text
    assert "best epoch  accuracy 0.9500, epoch 3" in text
    assert "target      0.9450 reached after 10.0 s of training, epoch 2" in text
    assert "training    12.5 s: 9.0 s the first epoch, 1.00 s each of the others" in text
    assert "not reached" in summary(rows, 0.951)
    assert "others" not in summary(rows[:1], 0.9)


def test_the_script_learns_and_says_so(capsys, tmp_path):
    words = "--model mlp --data synthetic --devices cpu:1 --epochs 2 --batch-size 500 --padding 1 --lr 0.1"
    fashion_mnist.main([*words.split(), "--target", "0.6", "--out", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert said.count("\nepoch ") + said.startswith("epoch ") == 2
    assert "mlp on 1 device (CPU): single, math, eager, fp32" in said
    assert "target      0.6000 reached after" in said
    assert (tmp_path / "run/train.json").exists()


def test_a_setting_that_cannot_work_is_one_line_and_the_exit_code_of_its_error(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        fashion_mnist.main(["--data-dir", str(tmp_path), "--devices", "cpu:1"])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert "no folder" in said
    assert said.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["graph", "compiled-graph"])
def test_its_steps_are_recorded(kind):
    run = kway.train(job(batch_size=11), devices="cuda:0", epochs=1, steps=6, step_kind=kind)
    assert run.record.step_kind == kind
    assert not [text for text in run.record.notices if "not recorded" in text]
