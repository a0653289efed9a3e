"""What kway will not do though others do: named by kind, with the reason."""

import pytest

from kway.errors import UsageError
from kway.refused import reason
from kway.registry import known


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("strategy", "FedAvg", "average their weights"),
        ("strategy", "local-sgd=4", "average their weights"),
        ("setting", "power_sgd", "would be changed"),
        ("precision", "fp8_e4m3", "two or three bits of mantissa"),
    ],
)
def test_what_is_refused_says_why(kind, name, said):
    with pytest.raises(UsageError, match=f"{kind} '{name}': kway refuses it: .*{said}"):
        known(kind, name, {"data": 1})


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("model", "topk"),
        ("data set", "federated"),
        ("command", "compress"),
        ("strategy", "dta"),
        ("strategy", "fp8"),
    ],
)
def test_a_name_of_another_kind_is_merely_unknown(kind, name):
    assert reason(kind, name) is None
    with pytest.raises(UsageError, match=f"unknown {kind}"):
        known(kind, name, {"data": 1})
