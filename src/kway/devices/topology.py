"""One picture of the machine: what there is, what the environment hides, and which back end serves it."""

import os
from collections.abc import Mapping
from typing import Any

from kway.devices import cpu, cuda, mps, networks, numa, rocm, rocm_visible, torch_facts
from kway.devices.fabric import LOCAL_CPUS, Surroundings, backend, between_local_gpus
from kway.devices.spelling import misspelled
from kway.devices.visible import NAME, Visible, visible
from kway.records import Cluster

GPU_FACTS = (
    "physical", "name", "uuid", "memory_total", "memory_free", "compute_capability", "bus", "numa_node"
)  # fmt: skip
AMD = "AMD"


def discover(environ: Mapping[str, str] | None = None) -> Cluster:
    """Describe this machine as a program with this environment (default: the process's own) sees it.

    Imports no torch and initialises no device. Never raises for what a driver refuses to tell.
    """
    environ = os.environ if environ is None else environ
    build = torch_facts.installed()
    build["remembered"] = torch_facts.read(build, environ)
    driver = _driver(build)
    for gpu in driver.gpus:
        gpu["numa_node"] = numa.of_bus(gpu["bus"])
    around = Surroundings(numa.nodes(), networks.infiniband(), networks.interfaces(), mps.read(build))
    return assemble(environ, cpu.describe(), driver, build, around)


def assemble(
    environ: Mapping[str, str],
    processors: dict[str, Any],
    driver: cuda.Driver,
    build: dict[str, Any],
    around: Surroundings = Surroundings(),  # noqa: B008 - a tuple, which nobody changes
) -> Cluster:
    """Put the parts together: a pure function.

    ``processors`` as ``cpu.describe`` gives them; ``build`` as ``torch_facts.installed`` does, with
    ``remembered`` (see ``torch_facts.read``) beside.
    """
    seen = _seen(environ, driver)
    warnings = misspelled(environ)
    remembered = build.get("remembered", {})
    has = remembered.get("backends")
    problem = _why_no_gpu(build, driver)
    # What CUDA_VISIBLE_DEVICES says is of interest only to those who have GPUs.
    if driver.gpus:
        warnings += seen.warnings
    order = [] if problem else seen.physical
    local = {physical: index for index, physical in enumerate(order)}
    if driver.gpus and problem:
        warnings.append(
            f"the driver shows {len(driver.gpus)} GPU{'s' * (len(driver.gpus) > 1)}, but {problem}: "
            f"install a {_platform(driver.maker)} build of torch to use them"
        )
    elif (
        not driver.gpus and driver.version is None and driver.problem not in (cuda.NO_DRIVER, rocm.NO_DRIVER)
    ):
        warnings.append(driver.problem)
    if build["version"] is None:
        warnings.append("torch is not installed: nothing can be trained here")
    warnings += _without_code(order, driver, remembered.get("architectures", []))
    quota = processors.get("quota")
    if quota is not None and quota < processors["affinity"]:
        warnings.append(
            f"this process may run on {processors['affinity']} processors, but its control group gives it "
            f"the time of {quota:g}: {processors['usable']} count as usable"
        )
    links = _local_links(driver.links, local)
    why_not = problem or f"{_hiding(environ, driver)} hides all {len(driver.gpus)} GPUs"
    return Cluster(
        cpu=processors,
        gpus=[{"index": index, **_facts(driver.gpus[physical])} for physical, index in local.items()],
        hidden=[
            {**_facts(gpu), "why": problem or f"left out by {_hiding(environ, driver)}"}
            for gpu in driver.gpus
            if gpu["physical"] not in local
        ],
        links=links,
        backends={
            "cpu": backend("cpu", LOCAL_CPUS, networks.between_cpus(environ, around.interfaces), has),
            "cuda": backend(
                "cuda",
                between_local_gpus(links),
                networks.between_gpus(environ, around.infiniband),
                has,
            )
            if order
            else {"name": "none", "why": why_not},
        },
        torch=build,
        driver=driver.version,
        warnings=warnings,
        driver_cuda=driver.cuda,
        numa=list(around.numa),
        infiniband=list(around.infiniband),
        interfaces=list(around.interfaces),
        mps=around.mps,
    )


def _driver(build: dict[str, Any]) -> cuda.Driver:
    """Ask the driver that torch is built for, and where it shows nothing the other one: its GPUs will be hidden."""
    first, second = (rocm.read, cuda.read) if build["hip"] else (cuda.read, rocm.read)
    found = first()
    if not found.gpus and (other := second()).gpus:
        return other
    return found


def _seen(environ: Mapping[str, str], driver: cuda.Driver) -> Visible:
    if driver.maker == AMD:
        return rocm_visible.seen(environ, driver.gpus)
    return visible(environ.get(NAME), driver.gpus, environ.get("CUDA_DEVICE_ORDER"))


def _hiding(environ: Mapping[str, str], driver: cuda.Driver) -> str:
    return rocm_visible.hiding(environ) if driver.maker == AMD else f"{NAME}={environ.get(NAME)}"


def _platform(maker: str) -> str:
    return "ROCm" if maker == AMD else "CUDA"


def _facts(gpu: dict[str, Any]) -> dict[str, Any]:
    return {key: gpu.get(key) for key in GPU_FACTS}


def _why_no_gpu(build: dict[str, Any], driver: cuda.Driver) -> str:
    """Say why no GPU can be used whatever the environment says; empty where one can."""
    if build["version"] is None:
        return "torch is not installed"
    if not driver.gpus and driver.problem:
        return driver.problem
    needed = _platform(driver.maker)
    built = "ROCm" if build["hip"] else "CUDA" if build["cuda"] else None
    if built is None:
        return f"torch {build['version']} is built without {needed}"
    return (
        ""
        if built == needed
        else f"torch {build['version']} is built for {built}, these are {driver.maker}'s"
    )


def _local_links(links: list[dict[str, Any]], local: dict[int, int]) -> list[dict[str, Any]]:
    """Keep the links between visible GPUs, with torch's indices, the smaller one first."""
    found = []
    for link in links:
        if link["a"] in local and link["b"] in local:
            a, b = sorted((local[link["a"]], local[link["b"]]))
            found.append({**link, "a": a, "b": b})
    return sorted(found, key=lambda link: (link["a"], link["b"]))


def _without_code(order: list[int], driver: cuda.Driver, architectures: list[str]) -> list[str]:
    """Warn for GPUs that this torch has no code for: NVIDIA's older than all of it, AMD's that are not listed."""
    numbers = [int(digits) for name in architectures if (digits := name.partition("_")[2]).isdigit()]
    # gfx90a:sramecc+ and the like: one architecture with features on or off.
    families = {name.partition(":")[0] for name in architectures if name.startswith("gfx")}
    lines = []
    for index, physical in enumerate(order):
        capability = driver.gpus[physical]["compute_capability"]
        if not capability:
            continue
        if driver.maker == AMD:
            lacks = bool(families) and capability not in families
            lines += [f"cuda:{index} is a {capability}, which this torch has no code for"] if lacks else []
        elif numbers and int(capability.replace(".", "")) < min(numbers):
            lines.append(
                f"cuda:{index} has compute capability {capability}, older than all that this torch has code "
                f"for ({', '.join(architectures)})"
            )
    return lines
