import pytest
import torch.distributed as dist

from kway.errors import UsageError
from kway.launch.built import usable_backend


def test_this_torch_serves_cpu_ranks():
    assert usable_backend("cpu") == "gloo"


@pytest.fixture
def with_only(monkeypatch):
    def only(*names):
        for name in ("gloo", "nccl", "mpi"):
            monkeypatch.setattr(dist, f"is_{name}_available", lambda name=name: name in names)

    return only


def test_gpu_ranks_go_by_what_torch_has(with_only):
    with_only("gloo", "nccl")
    assert usable_backend("cuda:1") == "nccl"
    with_only("gloo")
    with pytest.raises(UsageError, match="this torch has neither of NCCL and MPI"):
        usable_backend("cuda:1")


def test_mpi_alone_is_refused_with_the_reason(with_only):
    with_only("mpi")
    with pytest.raises(UsageError, match=r"only MPI for ranks on cpu: .* a store, .* a torch that has Gloo"):
        usable_backend("cpu")
