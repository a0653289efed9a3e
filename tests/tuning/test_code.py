"""What is remembered of a model is not taken for another one's."""

import torch
from torch import nn

from kway.tuning.code import object_code

SOURCE = """
from torch import nn

TIMES = {times}


def again(x):
    for _ in range(TIMES):
        x = x {sign} 1
    return x


class Net(nn.Module):
    def __init__(self, depth=1):
        super().__init__()
        self.depth, self.layer = depth, nn.Linear(2, 2)

    def forward(self, x):
        return self.deep(self.layer(x))

    def deep(self, x):
        return again(x) {more}
"""


def net(depth=1, times=2, sign="+", more=""):
    names = {"__name__": "of_the_user"}
    exec(SOURCE.format(times=times, sign=sign, more=more), names)
    return names["Net"](depth)


def test_the_same_code_is_the_same():
    model = net()
    assert object_code(model) == object_code(net()) == object_code(model.eval())
    with torch.no_grad():
        model.layer.weight.zero_()
    assert object_code(model) == object_code(net())


def test_attributes_globals_methods_and_what_they_call_count():
    others = [net(depth=2), net(times=3), net(sign="*"), net(more="* 2")]
    codes = {object_code(each) for each in [net(), *others]}
    assert len(codes) == 5


def test_what_versions_stand_for_has_no_code():
    assert [object_code(each) for each in (nn.Linear(2, 2), (1, 2), torch.zeros(2))] == ["", "", ""]
