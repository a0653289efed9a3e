"""The small arithmetic of batch statistics: in closed form, and compiled once for layers of all widths."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from kway.step.arithmetic import MOST_NUMBERS, Arithmetic, handed, moved, packed, pooled

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
    assert float(count) == 7
    torch.testing.assert_close(mean, x.mean(0), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(var, x.var(0, correction=0), rtol=1e-14, atol=1e-14)


def test_running_statistics_move_as_torch_moves_them():
    x, rows = of_shares(3)
    layer = torch.nn.BatchNorm1d(3, momentum=0.3).double()
    layer(x)
    running = [torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    moved(running, *pooled(rows), Arithmetic().number(0.3, CPU))
    for own, expected in zip(running, (layer.running_mean, layer.running_var), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-14, atol=1e-14)


def test_sums_of_ranks_and_the_gradients_of_one():
    own = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    over, weight, bias = handed(
        torch.stack([own, 2 * own]), own, torch.tensor([2.0, 0.5]), torch.float32, None
    )
    assert over.tolist() == [[3, 6], [9, 12]]
    assert (weight.tolist(), bias) == ([6, 2], None)


@pytest.mark.parametrize("name", ["pooled", "moved", "handed"])
def test_layers_of_all_widths_share_one_code(name):
    counter = CompileCounter()
    function = torch.compile(getattr(Arithmetic(), name), dynamic=True, backend=counter)
    plain = getattr(Arithmetic(), name)
    for channels in (5, 7, 8, 11):
        _, rows = of_shares(channels)
        mean, var, count = pooled(rows)
        sums = rows[:, : 2 * channels].view(3, 2, channels)
        running = [torch.zeros(channels), torch.ones(channels)]
        given = {
            "pooled": (rows,),
            "moved": (running, mean, var, count, Arithmetic().number(1 / channels, CPU)),
            "handed": (sums, sums[0], var, torch.float32, torch.float64),
        }[name]
        again = [[value.clone() for value in running], *given[1:]] if name == "moved" else given
        found, expected = function(*given), plain(*again)
        if name == "moved":
            found, expected = running, again[0]
        assert all(map(torch.equal, found, expected))
    assert counter.frame_count == 1


def test_numbers_are_kept_up_to_a_number():
    kept = Arithmetic()
    first = kept.number(0, CPU)
    assert [float(kept.number(value, CPU)) for value in range(MOST_NUMBERS + 2)][-1] == MOST_NUMBERS + 1
    assert kept.number(0, CPU) is first
    assert kept.number(MOST_NUMBERS + 1, CPU) is not kept.number(MOST_NUMBERS + 1, CPU)
