import ctypes
import os
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.training.parts import training_parts

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
SAMPLES, BATCH, EPOCHS = 29, 13, 2


def network():
    """A small network with everything that a share could get wrong: batch statistics, weights, a bias."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 36, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5),
    )  # fmt: skip


def samples(count=SAMPLES):
    """Images of 8 x 8 and labels of five classes; some labels are ignored."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(5, (count,), generator=draw)
    labels[::7] = -100
    return torch.randn(count, 2, 8, 8, generator=draw), labels


def job(**changes):
    options = {
        "model": network,
        "loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.5, 3.0])),
        "optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "data": samples(),
        "batch_size": BATCH,
        "precision": "fp64",
        "seed": 3,
        **changes,
    }
    return kway.Job(**options)


def by_hand(given, epochs=EPOCHS):
    """Train in plain torch, whole batches in the order of the job, on one GPU."""
    torch.manual_seed(given.seed)
    model = given.model().to(DEVICE, torch.float64)
    optimizer = given.optimizer(model.parameters())
    loss = nn.CrossEntropyLoss(weight=given.loss.weight.to(DEVICE, torch.float64))
    images, labels = (value.to(DEVICE) for value in given.data)
    order = training_parts(given)[0].order
    for epoch in range(epochs):
        for step in range(order.steps(epoch)):
            rows = torch.from_numpy(order.batch(epoch, step)).to(DEVICE)
            optimizer.zero_grad()
            loss(model(images[rows].double()), labels[rows]).backward()
            optimizer.step()
    return {name: value.cpu() for name, value in model.state_dict().items()}


def assert_equal_state(model, expected, tolerance=1e-10):
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name].cpu(), value, rtol=tolerance, atol=tolerance, msg=name)


def test_one_gpu_in_this_process_equals_plain_torch(one):
    run = kway.train(job(), devices=one, epochs=EPOCHS)
    assert run.plan.device_set == [one]
    assert next(run.model.parameters()).device == torch.device(one)
    assert_equal_state(run.model, by_hand(job()))


def test_two_gpus_equal_plain_torch(pair, two):
    """Shares of 7 and 6, then 2 and 1, with ignored labels: weights and buffers as of one device."""
    run = kway.train(job(), devices=two, strategy="data", epochs=EPOCHS, ranks=pair)
    assert run.plan.devices == 2
    assert_equal_state(run.model, by_hand(job()))
    assert len(run.record.peak_memory_bytes) == 2
    assert min(run.record.peak_memory_bytes) > 0


def images_only():
    """As above without the layer that has one value a channel for each sample."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


def test_a_last_batch_of_one_sample_leaves_a_gpu_without_work(pair, two):
    images, labels = samples(27)
    given = job(model=images_only, data=(images, labels.clamp(min=0)))
    assert_equal_state(kway.train(given, devices=two, epochs=EPOCHS, ranks=pair).model, by_hand(given))


class Stream(torch.utils.data.IterableDataset):
    """The samples one after another; rank r begins with number ``first`` * r."""

    def __init__(self, first=0):
        self.first = first

    def __iter__(self):
        return iter(list(zip(*samples(), strict=True))[self.first * int(os.environ.get("RANK", "0")) :])


def test_a_stream_on_two_gpus_gives_what_one_device_gives(pair, two):
    given = job(shuffle=False)
    streamed = kway.train(job(data=Stream(), shuffle=False), devices=two, epochs=EPOCHS, ranks=pair)
    assert_equal_state(streamed.model, by_hand(given))


def test_a_stream_that_two_gpus_see_differently_is_an_error(two):
    with pytest.raises(kway.DataError, match="step 1, Stream gives rank 1 other items"):
        kway.train(job(data=Stream(1), shuffle=False), devices=two, epochs=1)


def test_evaluation_and_prediction_on_two_gpus_count_every_sample_once(two):
    given = job(
        loss=nn.CrossEntropyLoss(), validation=samples(11), metrics={"accuracy": accuracy_but_ignored}
    )
    model = network().double()
    ours = kway.evaluate(given, model.state_dict(), devices=two)
    outputs = kway.predict(given, model.state_dict(), devices=two)
    images, labels = samples(11)
    with torch.no_grad():
        scores = model.eval()(images.double())
    torch.testing.assert_close(outputs, scores, rtol=1e-10, atol=1e-10)
    assert ours["loss"] == pytest.approx(float(nn.functional.cross_entropy(scores, labels)), rel=1e-10)
    right = (scores.argmax(1) == labels)[labels >= 0].double().mean()
    assert ours["accuracy"] == pytest.approx(float(right))


def accuracy_but_ignored(output, target):
    kept = target >= 0
    return ((output.argmax(1) == target) & kept).sum(), kept.sum()


@pytest.mark.parametrize(
    ("precision", "inside"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_precisions_on_one_gpu(one, precision, inside):
    seen = set()

    def loss(output, target):
        flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        seen.add((output.dtype, *flags))
        return nn.functional.cross_entropy(output.float(), target, reduction="none")

    run = kway.train(job(loss=loss, precision=precision), devices=one, epochs=6)
    tf32 = precision == "tf32"
    assert seen == {(inside, tf32, tf32)}
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    assert run.epochs[-1]["train_loss"] < run.epochs[0]["train_loss"]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_precisions_on_two_gpus_follow_one(pair, one, two, precision):
    # Equal weights: whether float16 overflows, and a step is left out, hangs on the scale of the loss.
    images, labels = samples()
    given = job(precision=precision, loss=nn.CrossEntropyLoss(), data=(images, labels.clamp(min=0)))
    alone = kway.train(given, devices=one, epochs=3)
    both = kway.train(given, devices=two, epochs=3, ranks=pair)
    tolerance = {"fp32": 1e-4, "tf32": 5e-2, "bf16": 0.15, "fp16": 5e-2}[precision]
    for a, b in zip(alone.epochs, both.epochs, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=tolerance)
    assert {parameter.dtype for parameter in both.model.parameters()} == {torch.float32}


@pytest.fixture
def flags():
    """Sets both flags of TF32, which are as they were after the test. (pytest's own way would delete the first.)"""

    def put(matmul, cudnn):
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn

    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield put
    put(*before)


@pytest.mark.parametrize("before", [(True, True), (False, True), (True, False)], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_tf32_flags_are_the_users_again(one, flags, precision, before):
    flags(*before)
    kway.train(job(precision=precision), devices=one, epochs=1, steps=1)
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


def test_tf32_flags_are_the_users_again_after_an_error(one, flags):
    flags(False, True)

    def loss(output, target):
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose"):
        kway.train(job(loss=loss), devices=one, epochs=1)
    assert torch.backends.cudnn.allow_tf32


def test_random_state_and_current_device_stay_the_users(one):
    torch.cuda.manual_seed(5)
    expected = torch.rand(3, device=one)
    torch.cuda.manual_seed(5)
    current = torch.cuda.current_device()
    kway.train(job(), devices=one, epochs=1)
    assert torch.equal(torch.rand(3, device=one), expected)
    assert torch.cuda.current_device() == current


def test_the_second_gpu_alone_leaves_the_first_alone(two):
    """In this process: nothing is allocated on a card that the job does not name."""
    del two
    torch.cuda.synchronize(0)
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.max_memory_allocated(0)
    run = kway.train(job(), devices="cuda:1", epochs=1)
    assert torch.cuda.max_memory_allocated(0) == before
    assert {value.device for value in run.model.state_dict().values()} == {torch.device("cuda:1")}


def foreign_contexts():
    """Count the cards other than this rank's own on which this process has a context, asking the driver."""
    driver = ctypes.CDLL("libcuda.so.1")
    count, active, flags, card = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    found = []
    for index in range(count.value):
        assert driver.cuDeviceGet(ctypes.byref(card), index) == 0
        assert driver.cuDevicePrimaryCtxGetState(card, ctypes.byref(flags), ctypes.byref(active)) == 0
        if active.value:
            found.append(index)
    own = torch.cuda.current_device()
    assert own in found, f"contexts on {found}, and this rank's card is {own}"
    return len(found) - 1


def foreign_bytes():
    """The most memory that torch took from other cards than this rank's own."""
    own = torch.cuda.current_device()
    others = [index for index in range(torch.cuda.device_count()) if index != own]
    return sum(torch.cuda.max_memory_reserved(index) for index in others)


def contexts_elsewhere(output, target):
    del target
    return output.new_full((len(output),), float(foreign_contexts()))


def bytes_elsewhere(output, target):
    del target
    return output.new_full((len(output),), float(foreign_bytes()))


def test_each_rank_stays_on_its_own_card(two):
    """Ranks of their own, a model and data that lie on the first card in the caller's process."""
    torch.manual_seed(0)
    model = network().to(DEVICE)
    images, labels = samples()
    given = job(
        model=model,
        precision="fp32",
        data=(images.to(DEVICE), labels.to(DEVICE)),
        metrics={"contexts": contexts_elsewhere, "bytes": bytes_elsewhere},
    )
    run = kway.train(given, devices=two, epochs=1)
    assert run.epochs[0]["train_contexts"] == 0
    assert run.epochs[0]["train_bytes"] == 0
    assert run.model is model


def test_cuda_that_was_used_before_is_no_obstacle(two):
    """As in a notebook: this process has a context, memory and a stream's worth of work before ranks start."""
    mine = torch.arange(1000.0, device=DEVICE)
    total = mine.sum()
    run = kway.train(job(), devices=two, epochs=EPOCHS)
    assert_equal_state(run.model, by_hand(job()))
    assert float(total) == 499500.0
    assert torch.equal(mine.cpu(), torch.arange(1000.0))


def test_bits_are_the_same_on_one_and_two_gpus(one, two):
    """One GPU in this process, which may have used cuBLAS before; two in ranks of their own."""
    given = job(precision="fp32", data=samples(48), batch_size=16)
    alone = kway.train(given, devices=one, exactness="bits", epochs=EPOCHS)
    both = kway.train(given, devices=two, exactness="bits", epochs=EPOCHS)
    assert alone.record.weights_sha256 == both.record.weights_sha256
    assert [row["train_loss"] for row in alone.epochs] == [row["train_loss"] for row in both.epochs]
