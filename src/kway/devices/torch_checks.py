"""What the doctor makes of torch, drivers, back ends and compilers: judged from facts, nothing is asked here."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kway.backends import TITLES, choose
from kway.devices.checks import FAIL, WARN, Check, good
from kway.records import Cluster

# The oldest torch that kway runs with, as pyproject.toml asks for.
OLDEST = (2, 11)
_INSTALL = "install one: https://pytorch.org/get-started"


def checks(cluster: Cluster, probe: Mapping[str, Any], lacks: Callable[[str], str | None]) -> Iterator[Check]:
    """Yield the checks. ``probe``: what ``torch_probe.run`` returned. ``lacks``: see ``compilers.missing``."""
    yield torch_works(probe)
    yield gpus_work(cluster, probe)
    if "error" not in probe:
        if cluster.mps is not None:
            yield metal_works(cluster.mps, probe)
        yield from back_ends(probe)
    yield compiler(lacks, bool(cluster.gpus))


def torch_works(probe: Mapping[str, Any]) -> Check:
    """Judge whether torch loads, is new enough and computes."""
    name = "torch"
    if "error" in probe:
        return Check(name, FAIL, probe["error"], f"mend or replace torch, or {_INSTALL}")
    version = probe["version"]
    if _numbers(version) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        return Check(name, FAIL, f"{version} is older than {needed}", f"pip install 'torch>={needed}'")
    if not probe["cpu"]:
        return Check(
            name, FAIL, f"{version} computes wrong products on this CPU", "install another build of torch"
        )
    return good(name, f"{version} loads and computes, {probe['seconds']:.1f} s")


def gpus_work(cluster: Cluster, probe: Mapping[str, Any]) -> Check:
    """Judge whether each visible GPU computes; where one does not, whether a driver older than torch's build is why."""
    name, why = "GPUs", cluster.backends["cuda"]["why"]
    if not cluster.gpus:
        if any(not gpu["why"].startswith("left out by") for gpu in cluster.hidden):
            found = f"{len(cluster.hidden)} there, but {why}"
            return Check(name, FAIL, found, "install a build of torch for them")
        if cluster.driver is None and why in cluster.warnings:
            return Check(
                name, FAIL, why, "install or restart the driver; in a container: docker run --gpus all"
            )
        return good(name, f"none to be used: {why}")
    if "error" in probe:
        return Check(name, WARN, f"{len(cluster.gpus)} not tried: torch does not load", "mend torch first")
    seen, old = probe["gpus"], _old_driver(cluster)
    if len(seen) != len(cluster.gpus):
        found = f"the driver shows {len(cluster.gpus)}, torch sees {len(seen)}"
        do = "look for a driver newer or older than its kernel module (nvidia-smi says so), and restart"
    else:
        found = "; ".join(
            f"cuda:{i} ({gpu['name']}): {gpu['error']}" for i, gpu in enumerate(seen) if gpu["error"]
        )
        do = "install a torch with code for these GPUs, or see who else uses them"
    if found:
        return Check(name, FAIL, f"{found}; {old[0]}", old[1]) if old else Check(name, FAIL, found, do)
    built, runs = cluster.torch["cuda"], cluster.driver_cuda
    platform = f"CUDA {built}, the driver runs {runs or '?'}" if built else f"ROCm {cluster.torch['hip']}"
    return good(name, f"{len(seen)} computed a sum; torch is built for {platform}")


def _old_driver(cluster: Cluster) -> tuple[str, str] | None:
    """Return what is wrong with versions, and what to do; ``None`` where the driver is as new as torch's build.

    No failure by itself: with NVIDIA's package for forward compatibility a newer CUDA runs on an older driver.
    """
    built, runs = cluster.torch["cuda"], cluster.driver_cuda
    if not built or not runs or _numbers(built)[0] <= _numbers(runs)[0]:
        return None
    return (
        f"torch is built for CUDA {built}, driver {cluster.driver} runs CUDA {runs} at most",
        f"update the driver, or install a torch for CUDA {_numbers(runs)[0]}",
    )


def metal_works(mps: Mapping[str, Any], probe: Mapping[str, Any]) -> Check:
    """Judge whether torch takes the GPU of an Apple computer."""
    if mps["usable"] and not probe["mps"]:
        return Check(
            "MPS", WARN, f"torch does not take the GPU of {mps['name']}", "install torch for Apple silicon"
        )
    return good("MPS", mps["why"])


def back_ends(probe: Mapping[str, Any]) -> Iterator[Check]:
    """Judge whether torch has what carries collectives, and whether NCCL reaches every GPU."""
    has, count = probe["remembered"]["backends"], len(probe["gpus"])
    for kind, ranks in (("cpu", "CPU ranks"), ("cuda", "GPU ranks")):
        usual = choose(kind)
        assert usual is not None
        name = TITLES[usual.rule.backend]
        if kind == "cuda" and not count:
            yield good(name, "no GPU needs it")
        elif not has[usual.rule.backend]:
            only_one = kind == "cuda" and count == 1
            do = f"install a build of torch with {name} to use several {'GPUs' if kind == 'cuda' else 'CPU ranks'}"
            yield Check(name, WARN if only_one else FAIL, f"this torch has none: {ranks} cannot talk", do)
        elif kind == "cpu":
            yield good(name, "torch has it")
        else:
            yield _nccl(name, probe, count)


def _nccl(name: str, probe: Mapping[str, Any], count: int) -> Check:
    version = probe["remembered"]["nccl"] or "of unknown version"
    if probe["all_reduce"] is None:
        return good(name, f"{version}; one GPU has nobody to talk to")
    if probe["all_reduce"]["error"]:
        return Check(
            name,
            FAIL,
            f"{version}: all-reduce over {count} GPUs: {probe['all_reduce']['error']}",
            "run again with NCCL_DEBUG=WARN; try NCCL_P2P_DISABLE=1, and a larger /dev/shm in containers",
        )
    return good(name, f"{version}; all-reduce over {count} GPUs is right")


def compiler(lacks: Callable[[str], str | None], has_gpus: bool) -> Check:
    """Judge whether torch.compile finds what it needs; without, steps run eagerly."""
    for device in ("cpu", "cuda") if has_gpus else ("cpu",):
        lack = lacks(device)
        if lack is not None:
            do = "install one (Debian: apt-get install g++ python3-dev; with GPUs also pip install triton)"
            return Check("compiler", WARN, f"torch.compile cannot compile for {device}: {lack}", do)
    return good("compiler", "torch.compile finds what it needs")


def _numbers(version: str) -> tuple[int, ...]:
    """Return major and minor number of ``2.13.0+cpu``."""
    parts = [part for part in version.partition("+")[0].split(".")[:2] if part.isdigit()]
    return tuple(int(part) for part in parts) or (0,)
