"""What ``kway devices --doctor`` does: every check of the installation, in the order in which to mend."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from kway.devices import compilers, system_checks, torch_checks, torch_probe
from kway.devices.checks import FAIL, Check
from kway.records import Cluster


def examine(
    cluster: Cluster,
    environ: Mapping[str, str] | None = None,
    probe: Callable[[], Mapping[str, Any]] = torch_probe.run,
) -> list[Check]:
    """Check this machine, of which ``cluster`` is the description. Takes seconds: torch is loaded in a new process."""
    environ = os.environ if environ is None else environ
    return [
        *torch_checks.checks(cluster, probe(), lambda device: compilers.missing(device, environ)),
        *system_checks.checks(cluster, environ),
    ]


def failed(checks: list[Check]) -> bool:
    """Whether something must be mended."""
    return any(check.outcome == FAIL for check in checks)
