"""A machine that is not there: to plan for one before it is bought, and to test without one."""

from typing import Any

from kway.devices.cuda import NO_DRIVER, Driver, absent
from kway.devices.topology import assemble
from kway.records import Cluster

GIB = 1 << 30


def simulated(
    gpus: int = 0,
    cores: int = 8,
    visible: str | None = None,
    torch_cuda: str | None = "13.0",
    gpu_name: str = "simulated GPU",
    gpu_memory: int = 80 * GIB,
    memory: int = 64 * GIB,
    over: str = "nvlink",
) -> Cluster:
    """Describe a machine of ``cores`` processors and ``gpus`` equal GPUs, each pair linked ``over`` the same.

    ``visible`` is its ``CUDA_VISIBLE_DEVICES`` (``None``: unset), ``torch_cuda`` the CUDA version of its
    torch (``None``: a build without CUDA); ``memory`` and ``gpu_memory`` in bytes.
    """
    cards: list[dict[str, Any]] = [
        {
            "physical": index,
            "name": gpu_name,
            "uuid": f"GPU-{index:08d}-0000-0000-0000-000000000000",
            "memory_total": gpu_memory,
            "memory_free": gpu_memory,
            "compute_capability": "9.0",
            "bus": None,
            "mig": [],
        }
        for index in range(gpus)
    ]
    links = [
        {"a": a, "b": b, "peer": True, "over": over, "nvlinks": None}
        for a in range(gpus)
        for b in range(a + 1, gpus)
    ]
    driver = Driver("simulated", cards, links) if gpus else absent(NO_DRIVER)
    processors = {
        "model": "simulated CPU",
        "cores": cores,
        "logical": cores,
        "affinity": cores,
        "quota": None,
        "usable": cores,
        "memory_total": memory,
        "memory_available": memory,
    }
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    build: dict[str, Any] = {
        "version": "simulated",
        "cuda": torch_cuda,
        "hip": None,
        "git": None,
        "remembered": {},
    }
    return assemble(environ, processors, driver, build)
