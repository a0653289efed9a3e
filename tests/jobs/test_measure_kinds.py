"""Which GPUs stand for others."""

from types import SimpleNamespace

from kway.jobs.measuring import alike


def test_the_first_gpu_of_a_kind_stands_for_the_others():
    gpus = [
        {"index": index, "name": name, "memory_total": memory}
        for index, (name, memory) in enumerate([("A", 80), ("B", 80), ("A", 80), ("A", 40), ("B", 80)])
    ]
    devices = ("cpu", *(f"cuda:{index}" for index in range(5)))
    assert alike(SimpleNamespace(gpus=gpus), devices) == {"cuda:2": "cuda:0", "cuda:4": "cuda:1"}
    assert alike(SimpleNamespace(gpus=gpus), ("cpu", "cuda:2", "cuda:3")) == {}
