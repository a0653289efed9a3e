"""One picture of the machine: what there is, what the environment hides, and which back end serves it."""

import os
from collections.abc import Mapping
from typing import Any

from kway.devices import cpu, cuda, torch_facts
from kway.devices.spelling import misspelled
from kway.devices.visible import NAME, visible
from kway.records import Cluster

GPU_FACTS = ("physical", "name", "uuid", "memory_total", "memory_free", "compute_capability")


def discover(environ: Mapping[str, str] | None = None) -> Cluster:
    """Describe this machine as a program with this environment (default: the process's own) sees it.

    Imports no torch and initialises no device. Never raises for what a driver refuses to tell.
    """
    environ = os.environ if environ is None else environ
    build = torch_facts.installed()
    build["remembered"] = torch_facts.read(build, environ)
    return assemble(environ, cpu.describe(), cuda.read(), build)


def assemble(
    environ: Mapping[str, str], processors: dict[str, Any], driver: cuda.Driver, build: dict[str, Any]
) -> Cluster:
    """Put the parts together: a pure function.

    ``processors`` as ``cpu.describe`` gives them; ``build`` as ``torch_facts.installed`` does, with
    ``remembered`` (see ``torch_facts.read``) beside.
    """
    seen = visible(environ.get(NAME), driver.gpus, environ.get("CUDA_DEVICE_ORDER"))
    warnings = misspelled(environ)
    remembered = build.get("remembered", {})
    problem = _why_no_cuda(build, driver)
    # What CUDA_VISIBLE_DEVICES says is of interest only to those who have GPUs.
    if driver.gpus:
        warnings += seen.warnings
    order = [] if problem else seen.physical
    local = {physical: index for index, physical in enumerate(order)}
    if driver.gpus and problem:
        warnings.append(
            f"the driver shows {len(driver.gpus)} GPU{'s' * (len(driver.gpus) > 1)}, but {problem}: "
            "install a CUDA build of torch to use them"
        )
    elif not driver.gpus and driver.version is None and driver.problem != cuda.NO_DRIVER:
        warnings.append(driver.problem)
    if build["version"] is None:
        warnings.append("torch is not installed: nothing can be trained here")
    warnings += _too_old(order, driver, remembered.get("architectures", []))
    quota = processors.get("quota")
    if quota is not None and quota < processors["affinity"]:
        warnings.append(
            f"this process may run on {processors['affinity']} processors, but its control group gives it "
            f"the time of {quota:g}: {processors['usable']} count as usable"
        )
    return Cluster(
        cpu=processors,
        gpus=[{"index": index, **_facts(driver.gpus[physical])} for physical, index in local.items()],
        hidden=[
            {**_facts(gpu), "why": problem or f"left out by {NAME}={environ.get(NAME)}"}
            for gpu in driver.gpus
            if gpu["physical"] not in local
        ],
        links=_local_links(driver.links, local),
        backends={
            "cpu": {"name": "gloo", "why": "collectives between CPU ranks of torch go over Gloo"},
            "cuda": _cuda_backend(bool(order), problem or _hidden_why(environ, driver), remembered),
        },
        torch=build,
        driver=driver.version,
        warnings=warnings,
    )


def _facts(gpu: dict[str, Any]) -> dict[str, Any]:
    return {key: gpu[key] for key in GPU_FACTS}


def _why_no_cuda(build: dict[str, Any], driver: cuda.Driver) -> str:
    """Say why no GPU can be used whatever the environment says; empty where one can."""
    if build["version"] is None:
        return "torch is not installed"
    if not build["cuda"]:
        if not driver.gpus and driver.problem:
            return driver.problem
        return f"torch {build['version']} is built without CUDA"
    return "" if driver.gpus else driver.problem


def _hidden_why(environ: Mapping[str, str], driver: cuda.Driver) -> str:
    return f"{NAME}={environ.get(NAME)} hides all {len(driver.gpus)} GPUs"


def _cuda_backend(usable: bool, why_not: str, remembered: dict[str, Any]) -> dict[str, str]:
    if not usable:
        return {"name": "none", "why": why_not}
    if remembered and not remembered["backends"]["nccl"]:
        return {"name": "gloo", "why": "this build of torch has no NCCL; Gloo goes through CPU memory"}
    return {"name": "nccl", "why": "collectives between NVIDIA GPUs go over NCCL, straight from GPU to GPU"}


def _local_links(links: list[dict[str, Any]], local: dict[int, int]) -> list[dict[str, Any]]:
    """Keep the links between visible GPUs, with torch's indices, the smaller one first."""
    found = []
    for link in links:
        if link["a"] in local and link["b"] in local:
            a, b = sorted((local[link["a"]], local[link["b"]]))
            found.append({**link, "a": a, "b": b})
    return sorted(found, key=lambda link: (link["a"], link["b"]))


def _too_old(order: list[int], driver: cuda.Driver, architectures: list[str]) -> list[str]:
    """Warn for GPUs older than anything that this torch has code for."""
    numbers = [int(digits) for name in architectures if (digits := name.partition("_")[2]).isdigit()]
    lines = []
    for index, physical in enumerate(order):
        capability = driver.gpus[physical]["compute_capability"]
        if numbers and capability and int(capability.replace(".", "")) < min(numbers):
            lines.append(
                f"cuda:{index} has compute capability {capability}, older than all that this torch has code "
                f"for ({', '.join(architectures)})"
            )
    return lines
