"""``kway --version``: the versions and devices that a report of a bug needs, without importing torch."""

import argparse
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar

from kway import __version__

if TYPE_CHECKING:
    from kway.records import Cluster


class ShowVersion(argparse.Action):
    """The flag that prints ``lines`` and ends with exit code 0."""

    HELP: ClassVar[str] = "show what a report of a bug needs: versions, system, devices"

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Look at the machine, print, leave."""
        from kway.devices.topology import discover

        print("\n".join(lines(discover())))
        parser.exit()


def lines(cluster: "Cluster") -> Iterator[str]:
    """Yield one fact a line, each under a name; the first is ``kway`` and its version."""
    yield f"kway {__version__}"
    yield f"torch     {_torch(cluster.torch)}"
    yield f"NCCL      {_nccl(cluster.torch)}"
    if cluster.driver:
        yield f"driver    {cluster.driver}"
    yield f"Python    {platform.python_version()} ({platform.python_implementation()})"
    yield f"system    {_system()}"
    yield f"CPU       {cluster.cpu['model']}, {cluster.cpu['usable']} usable logical processors"
    yield f"GPUs      {_gpus(cluster)}"


def _torch(build: Mapping[str, Any]) -> str:
    if not build["version"]:
        return "not installed"
    if build.get("hip"):
        return f"{build['version']}, ROCm {build['hip']}"
    return (
        f"{build['version']}, CUDA {build['cuda']}" if build["cuda"] else f"{build['version']}, without CUDA"
    )


def _nccl(build: Mapping[str, Any]) -> str:
    """What torch said of itself when it was last imported, else the version of the package that brings NCCL."""
    remembered = build.get("remembered") or {}
    if remembered:
        return str(remembered["nccl"] or "none in this torch")
    if not build["cuda"]:
        return "unknown" if build.get("hip") else "none in this torch"
    package = f"nvidia-nccl-cu{str(build['cuda']).partition('.')[0]}"
    try:
        return f"{version(package)} (package {package})"
    except PackageNotFoundError:
        return "unknown until torch has been imported once"


def _system() -> str:
    """Name the distribution where it says its name, the kernel, the architecture and the C library."""
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = ""
    kernel = f"{platform.system()} {platform.release()}"
    parts = [name, kernel, platform.machine(), " ".join(platform.libc_ver())]
    return ", ".join(part for part in parts if part.strip())


def _gpus(cluster: "Cluster") -> str:
    if not cluster.gpus:
        return f"none: {cluster.backends['cuda']['why']}"
    kinds = Counter(str(gpu["name"]) for gpu in cluster.gpus)
    named = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    return f"{named}; {len(cluster.hidden)} hidden" if cluster.hidden else named
