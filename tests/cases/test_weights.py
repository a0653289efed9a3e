"""Every share counts for what it holds: uneven splits, ignored labels, micro-batches, penalties."""

from functools import partial

import pytest
import torch
from tests.pairwise import pairwise
from torch import nn
from torch.nn import functional as F

import kway
from kway.data.order import split

SGD = partial(torch.optim.SGD, lr=1.0)


class Scale(nn.Module):
    """y = w * x, with one weight."""

    def __init__(self, w=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(float(w), dtype=torch.float64))

    def forward(self, x):
        return self.w * x


class Table(nn.Module):
    """Logits by token: (N, L) to (N, classes, L), as cross entropy takes them."""

    def __init__(self, rows, classes, bump):
        super().__init__()
        table = 0.1 * torch.arange(float(rows * classes), dtype=torch.float64).view(rows, classes)
        for i in range(min(rows, classes)):
            table[i, i] += bump
        self.table = nn.Parameter(table)

    def forward(self, tokens):
        return self.table[tokens].transpose(1, 2)


def job_of(model, loss, data, **more):
    more = {"optimizer": SGD, "precision": "fp64", "shuffle": False, "batch_size": len(data[0]), **more}
    return kway.Job(model=model, loss=loss, data=data, **more)


def own(output, _):
    return output


@pytest.mark.parametrize(("samples", "size"), [(13, 2), (13, 4), (3, 2), (2, 3), (1, 4)])
def test_w01_uneven_split_is_the_mean_over_samples(trained, samples, size):
    x = torch.arange(1.0, samples + 1, dtype=torch.float64)
    run = trained(job_of(Scale, nn.MSELoss(), (x, torch.zeros_like(x))), size)
    loss = float(x.square().sum()) / samples
    assert run.epochs[0]["train_loss"] == pytest.approx(loss, rel=1e-13)
    assert 1 - float(run.model.w) == pytest.approx(2 * loss, rel=1e-13)
    shares = [part for part in x.split(split(samples, size)) if len(part)]
    mean_of_means = sum(float(part.square().mean()) for part in shares) / len(shares)
    if samples % size and samples > size:
        assert abs(run.epochs[0]["train_loss"] - mean_of_means) > 0.5


def test_w01_numbers_of_the_report(trained):
    x = torch.arange(1.0, 14.0, dtype=torch.float64)
    run = trained(job_of(Scale, nn.MSELoss(), (x, torch.zeros_like(x))), 2)
    assert (run.epochs[0]["train_loss"], 1 - float(run.model.w)) == pytest.approx((63.0, 126.0), rel=1e-13)


PAD = [[0, 1, 2, 0, 0], [0, 1, 2, 3, 0]]
LABELS = [[1, -100, -100, -100, -100], [0, 1, 2, 0, 2]]
NONE_VALID = [[-100] * 5, [0, 1, 2, 0, 2]]
SEVERAL = [[1, -100, -100, -100, -100], [0, 1, 2, 0, 2], [-100] * 5, [2, 2, -100, 1, -100], [0, 0, 0, 0, 1]]
TOKENS = [[0, 1, 2, 0, 0], [0, 1, 2, 3, 0], [3, 3, 3, 3, 3], [1, 0, 2, 2, 3], [3, 2, 1, 0, 3]]


IGNORING = [
    (PAD, LABELS, -100),
    (PAD, NONE_VALID, -100),
    (TOKENS, SEVERAL, -100),
    (TOKENS, LABELS * 2 + [[0] * 5], 0),
]


@pytest.mark.parametrize(
    ("case", "weight", "size"),
    pairwise(IGNORING, [None, [1.0, 2.0, 5.0], [0.0, 3.0, 0.25]], [1, 2, 3]),
)
def test_w02_ignored_labels_and_class_weights(trained, case, weight, size):
    tokens, labels, ignore = case
    tokens, labels = torch.tensor(tokens), torch.tensor(labels)
    labels = labels.masked_fill(labels == -100, ignore)
    weight = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    loss = nn.CrossEntropyLoss(weight=weight, ignore_index=ignore)
    model = Table(4, 3, 0.3)
    before = model.table.detach().clone()
    expected = loss(model(tokens), labels)
    (gradient,) = torch.autograd.grad(expected, model.table)
    run = trained(job_of(model, loss, (tokens, labels)), size)
    assert run.epochs[0]["train_loss"] == pytest.approx(float(expected), rel=1e-13)
    torch.testing.assert_close(before - run.model.table.detach(), gradient, rtol=0, atol=1e-14)


def test_w02_numbers_of_the_report(trained):
    run = trained(
        job_of(partial(Table, 4, 3, 0.3), nn.CrossEntropyLoss(), (torch.tensor(PAD), torch.tensor(LABELS))), 2
    )
    assert run.epochs[0]["train_loss"] == pytest.approx(1.0404110073778214, rel=1e-13)
    moved = Table(4, 3, 0.3).table.detach() - run.model.table.detach()
    row = torch.tensor(
        [0.016916033888796075, -0.016361863988802988, -0.00055416989999299], dtype=torch.float64
    )
    torch.testing.assert_close(moved[0], row, rtol=0, atol=1e-14)


def masked(output, mask):
    return (output * mask).sum(), mask.sum()


def padded(rows):
    width = max(map(len, rows))
    values = torch.tensor([row + [99.0] * (width - len(row)) for row in rows], dtype=torch.float64)
    mask = torch.tensor([[1.0] * len(row) + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)
    return values, mask


REPORTED = [[1.0, 2.0, 3.0, 4.0], [], [10.0], [5.0, 7.0], [2.0, 4.0, 6.0, 8.0], []]


MOSTLY_EMPTY = [[], [], [], [3.0], [1.0, 8.0, 2.0]], [[4.0], [], [], [], [], [], []]


@pytest.mark.parametrize(
    ("size", "micro_batch", "rows"), pairwise([1, 2, 3, 4], [1, 2, None], [REPORTED, *MOSTLY_EMPTY])
)
def test_w03_micro_batches_with_uneven_and_no_tokens(trained, rows, micro_batch, size):
    run = trained(job_of(Scale, masked, padded(rows), micro_batch=micro_batch), size)
    tokens = [value for row in rows for value in row]
    right = sum(tokens) / len(tokens)
    assert run.epochs[0]["train_loss"] == pytest.approx(right, rel=1e-13)
    assert 1 - float(run.model.w) == pytest.approx(right, rel=1e-13)
    if rows is REPORTED:
        assert right == pytest.approx(52 / 11)
        assert min(abs(run.epochs[0]["train_loss"] - wrong) for wrong in (5.875, 3.9167, 4.6667)) > 0.05


@pytest.mark.parametrize(
    ("size", "cuts", "samples"),
    [(1, 1, 11), (2, 1, 11), (1, 4, 11), (2, 4, 11), (4, 2, 11), (3, 5, 11), (1, 4, 16), (2, 4, 16)],
)
def test_w04_no_factor_of_devices_or_accumulation(trained, size, cuts, samples):
    x = torch.arange(1.0, samples + 1, dtype=torch.float64)
    micro = max(1, -(-samples // size) // cuts)
    run = trained(job_of(Scale, own, (x, x), micro_batch=micro), size)
    assert 1 - float(run.model.w) == pytest.approx((samples + 1) / 2, rel=1e-13)


@pytest.mark.parametrize("size", [2, 3])
def test_w28_h01_a_rank_without_samples_dilutes_nothing(trained, size):
    x = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    run = trained(job_of(Scale, own, (x, x), batch_size=2), size)
    assert run.record.steps == 2
    assert float(run.model.w) == pytest.approx(1 - 1.5 - 2.0, rel=1e-14)  # and not 1 - 1.5 - 1.0


def half_square(model):
    return 0.5 * model.w.square()


def excess(output, x):
    return output - x


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [1, None])
def test_w30_a_penalty_counts_once(trained, size, micro_batch):
    x = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    job = job_of(partial(Scale, 2.0), excess, (x, x), penalty=half_square, micro_batch=micro_batch)
    run = trained(job, size)
    assert run.epochs[0]["train_loss"] == pytest.approx(5.0, rel=1e-13)  # not 3.5, not 7
    assert 2 - float(run.model.w) == pytest.approx(5.0, rel=1e-13)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [1, None])
def test_w30_a_sum_stays_a_sum(trained, size, micro_batch):
    x = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    job = job_of(Scale, nn.L1Loss(reduction="sum"), (x, torch.zeros_like(x)), micro_batch=micro_batch)
    run = trained(job, size)
    assert 1 - float(run.model.w) == pytest.approx(12.0, rel=1e-13)  # not 6
    assert kway.evaluate(job, run.model, devices="cpu:1")["loss"] == pytest.approx(-11.0 * -12.0)


class Complex(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.complex128))

    def forward(self, x):
        return (self.w * x).abs().square().sum(1)


class Conjugate(Complex):
    def forward(self, x):
        return (self.w.conj() * x).abs().square().sum(1)


@pytest.mark.parametrize(
    ("model", "precision", "size"), pairwise([Complex, Conjugate], ["fp32", "fp64"], [1, 2])
)
def test_w33_complex_parameters_keep_their_imaginary_part(trained, model, precision, size):
    x = torch.tensor([[1, 1j], [2, 2j]], dtype=torch.complex128)
    job = job_of(partial(model, [1 + 1j, 2 - 1j]), own, (x, torch.zeros(2)), precision=precision)
    run = trained(job, size)
    moved = torch.tensor([1 + 1j, 2 - 1j], dtype=torch.complex128) - run.model.w.detach()
    right = torch.tensor([5 + 5j, 10 - 5j], dtype=torch.complex128)
    torch.testing.assert_close(moved, right, rtol=0, atol=1e-13)


class Mixed(nn.Module):
    """Real and complex parameters; the outputs are real."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 1.5]))
        self.w = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j], dtype=torch.complex64))
        self.bias = nn.Parameter(torch.tensor(0.3 - 0.2j, dtype=torch.complex64))
        self.register_buffer("turn", torch.tensor([1j, 0.5 - 1j], dtype=torch.complex64))

    def forward(self, x):
        return (self.scale * (self.w.conj() * x * self.turn + self.bias)).abs().square().sum(1)


WAVES = torch.randn(11, 2, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("level", "clip", "micro_batch", "precision"),
    [
        ("math", None, None, "fp64"),
        ("math", 0.5, None, "fp32"),
        ("math", None, 2, "fp32"),
        ("loose", 0.5, 2, "fp64"),
        ("bits", 0.5, None, "fp32"),
        ("bits", 0.5, None, "fp64"),
    ],
)
def test_w33_the_proof_holds_for_complex_and_real_parameters(ranks, level, precision, clip, micro_batch):
    job = job_of(Mixed, own, (WAVES, torch.zeros(11)), batch_size=5, clip=clip, micro_batch=micro_batch)
    proof = kway.prove(
        job, devices="1,2,3,4", exactness=level, shards=4, precision=precision, ranks=ranks, echo=False
    )
    assert proof.verdict == "pass", [(row["equal"], row["reason"]) for row in proof.candidates]
    if level == "bits":
        assert [row["equal"] for row in proof.candidates] == ["bits"] * 4


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_w33_complex_weights_are_equal_to_the_bit(ranks, optimizer):
    job = job_of(
        Mixed, own, (WAVES, torch.zeros(11)), batch_size=5, optimizer=optimizer, precision="fp32", clip=0.7
    )

    def digest(context):
        run = kway.train(job, devices="cpu:1", exactness="bits", shards=4, epochs=3)
        return run.record.weights_sha256, run.model.w.detach()

    ((alone, w),) = ranks.run(digest, size=1)
    assert (w - Mixed().w).abs().min() > 1e-3
    assert (w.imag - Mixed().w.imag).abs().min() > 1e-4
    for size in (2, 3, 4):
        options = {"devices": f"cpu:{size}", "exactness": "bits", "shards": 4, "epochs": 3, "ranks": ranks}
        assert kway.train(job, **options, echo=False).record.weights_sha256 == alone


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("level", ["math", "bits"])
def test_w33_mixed_parameters_train_as_in_plain_torch(trained, level, size):
    model = Mixed()
    model.scale.data = model.scale.data.double()
    model.w.data, model.bias.data = (p.data.to(torch.complex128) for p in (model.w, model.bias))
    model.turn = model.turn.to(torch.complex128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for rows in WAVES.split(4):
        optimizer.zero_grad()
        model(rows).mean().backward()
        optimizer.step()
    micro_batch = 2 if level == "math" else None
    job = job_of(
        Mixed, own, (WAVES, torch.zeros(11)), batch_size=4, optimizer=partial(torch.optim.SGD, lr=0.05),
        micro_batch=micro_batch,
    )  # fmt: skip
    run = trained(job, size, exactness=level, shards=3)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=0, atol=1e-12, msg=name)


def test_w33_the_norm_for_clipping_has_both_parts(trained):
    x = torch.tensor([[1, 1j], [2, 2j]], dtype=torch.complex128)
    run = trained(job_of(partial(Complex, [1 + 1j, 2 - 1j]), own, (x, torch.zeros(2)), clip=1.0), 2)
    moved = torch.tensor([1 + 1j, 2 - 1j], dtype=torch.complex128) - run.model.w.detach()
    right = torch.tensor([5 + 5j, 10 - 5j], dtype=torch.complex128) / 13.228756555322954
    torch.testing.assert_close(moved, right, rtol=1e-6, atol=0)


def test_functional_and_module_losses_agree_on_ranks(trained):
    data = torch.tensor(TOKENS), torch.tensor(SEVERAL)
    weight = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    ways = [nn.CrossEntropyLoss(weight=weight), partial(F.cross_entropy, weight=weight)]
    losses = [
        trained(job_of(partial(Table, 4, 3, 0.1), way, data), 2).epochs[0]["train_loss"] for way in ways
    ]
    assert losses[0] == losses[1]
