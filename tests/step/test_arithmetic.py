"""The small arithmetic of batch statistics: in closed form, and compiled once for layers of all widths."""

import torch
from torch._dynamo.testing import CompileCounter

from kway.step.arithmetic import MOST_NUMBERS, Arithmetic, combined, packed, pooled

CPU = torch.device("cpu")


def statistics(x):
    return x.mean(0), x.var(0, correction=0)


def of_shares(channels):
    x = torch.randn(7, channels, generator=torch.Generator().manual_seed(channels), dtype=torch.float64)
    numbers = Arithmetic()
    rows = [packed(*statistics(part), numbers.number(len(part), CPU)) for part in (x[:4], x[4:5], x[5:])]
    return x, torch.stack(rows)


def test_statistics_of_shares_are_those_of_the_whole():
    x, rows = of_shares(3)
    mean, var, count = pooled(rows)
    assert count.tolist() == [7, 7, 7]
    torch.testing.assert_close(mean, x.mean(0), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(var, x.var(0, correction=0), rtol=1e-14, atol=1e-14)


def test_shares_are_added_up_one_after_the_other():
    # So many that a reduction adds up in another order, and not all of one size.
    x = torch.randn(400, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    cuts = [1 + place % 9 for place in range(72)]
    numbers = Arithmetic()
    rows = [packed(*statistics(part), numbers.number(len(part), CPU)) for part in x[: sum(cuts)].split(cuts)]
    parts = [(row[:3], row[3:6], row[6] / sum(cuts)) for row in rows]
    mean = var = torch.zeros(3, dtype=torch.float64)
    for own, _, part in parts:
        mean = mean + own * part
    for own, within, part in parts:
        var = var + torch.addcmul(within, own - mean, own - mean) * part
    found = pooled(torch.stack(rows))
    assert torch.equal(found[0], mean)
    assert torch.equal(found[1], var)


def test_running_statistics_move_as_torch_moves_them():
    x, rows = of_shares(3)
    layer = torch.nn.BatchNorm1d(3, momentum=0.3).double()
    layer(x)
    running = [torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    combined(rows, running, Arithmetic().number(0.3, CPU), 1e-5, torch.float64, True)
    for own, expected in zip(running, (layer.running_mean, layer.running_var), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-14, atol=1e-14)


def test_what_kernels_take():
    x, rows = of_shares(3)
    mean, invstd, var, count = combined(rows, [None, None], None, 1e-3, torch.float32, True)
    torch.testing.assert_close(mean, x.mean(0).float())
    torch.testing.assert_close(invstd, (x.var(0, correction=0) + 1e-3).rsqrt().float())
    torch.testing.assert_close(var, x.var(0, correction=0).float())
    assert (count.tolist(), count.dtype) == ([7, 7, 7], torch.int32)


def test_no_value_on_any_rank_moves_nothing_and_changes_nothing():
    running = [torch.full((2,), 3.0), torch.full((2,), 4.0)]
    found = combined(
        torch.zeros(3, 5).double(), running, Arithmetic().number(0.5, CPU), 0.0, torch.float32, False
    )
    assert [value.tolist() for value in found] == [[0, 0], [1, 1], [1, 1], [1, 1]]
    assert [value.tolist() for value in running] == [[3, 3], [4, 4]]


def test_layers_of_all_widths_share_one_code():
    counter = CompileCounter()
    function = torch.compile(combined, dynamic=True, backend=counter)
    for channels in (5, 7, 8, 11):
        _, rows = of_shares(channels)
        running = [torch.zeros(channels), torch.ones(channels)]
        again = [value.clone() for value in running]
        rest = Arithmetic().number(1 / channels, CPU), 1e-5, torch.float32, True
        found, expected = function(rows, running, *rest), combined(rows, again, *rest)
        assert all(map(torch.equal, (*found, *running), (*expected, *again)))
    assert counter.frame_count == 1


def test_what_is_listed_are_the_functions_alone():
    arithmetic = Arithmetic()
    arithmetic.more = 3
    assert {name: getattr(arithmetic, name) for name in arithmetic.names()} == {
        "packed": packed,
        "combined": combined,
    }


def test_numbers_are_kept_up_to_a_number():
    kept = Arithmetic()
    first = kept.number(0, CPU)
    assert [float(kept.number(value, CPU)) for value in range(MOST_NUMBERS + 2)][-1] == MOST_NUMBERS + 1
    assert kept.number(0, CPU) is first
    assert kept.number(MOST_NUMBERS + 1, CPU) is not kept.number(MOST_NUMBERS + 1, CPU)
