import pytest

from kway.backends import ANY, GROUPS, RULES, Rule, backend_of, choose, lacking
from kway.errors import UsageError


def has(*names):
    return {name: name in names for name in ("gloo", "nccl", "mpi")}


def test_who_does_not_know_the_links_gets_the_same_back_end():
    for kind, devices in GROUPS.items():
        rows = [rule for rule in RULES if rule.devices == devices]
        assert len(rows) > 1
        assert {rule.backend for rule in rows} == {choose(kind).rule.backend}
        for rule in rows:
            assert choose(kind, rule.over).rule == rule


@pytest.mark.parametrize(
    ("kind", "over", "there", "expected"),
    [
        ("cuda", "NVLink", has("nccl", "gloo", "mpi"), (1, "rule 1: GPUs over NVLink -> NCCL")),
        ("cuda", "InfiniBand", has("nccl"), (3, "rule 3: GPUs over InfiniBand -> NCCL")),
        ("cuda", "PCIe", has("gloo", "mpi"), (7, "rule 7: anything else over any link -> MPI")),
        ("cpu", "IP over InfiniBand", has("gloo"), (6, "rule 6: CPUs over IP over InfiniBand -> Gloo")),
        ("cpu", "Ethernet", has("mpi"), (7, "rule 7: anything else over any link -> MPI")),
        ("cpu", "NVLink", has("gloo", "mpi"), (7, "rule 7: anything else over any link -> MPI")),
        ("mps", None, has("gloo", "nccl", "mpi"), (7, "rule 7: anything else over any link -> MPI")),
        ("cuda", "NVLink", has("gloo"), None),
        ("mps", None, None, None),
    ],
)
def test_the_first_row_that_fits_and_that_torch_has(kind, over, there, expected):
    found = choose(kind, over, there)
    assert (found and (found.number, found.text)) == expected


def test_every_pair_of_devices_and_links_has_one_row():
    assert len({rule[:2] for rule in RULES}) == len(RULES)
    assert RULES[-1] == Rule(ANY, "any link", "mpi")


def test_back_end_of_ranks():
    assert backend_of(["cuda:0", "cuda:1"]) == "nccl"
    assert backend_of(["cpu", "cpu"]) == "gloo"
    assert backend_of(["cuda:0"], has("mpi", "gloo")) == "mpi"


@pytest.mark.parametrize(
    ("devices", "there", "words"),
    [
        (["cpu", "cuda:0"], None, "cpu and cuda ranks: all ranks are on CPUs or all on GPUs"),
        (["cuda:0"], has("gloo"), "cuda ranks: this torch has neither of NCCL and MPI"),
        (["cpu"], has("nccl"), "cpu ranks: this torch has neither of Gloo and MPI"),
    ],
)
def test_ranks_that_no_row_serves(devices, there, words):
    with pytest.raises(UsageError, match=words):
        backend_of(devices, there)
    assert lacking("cuda") == "this torch has neither of NCCL and MPI"
