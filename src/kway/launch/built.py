"""The back end that a rank's own torch has for its device, by the table of ``kway.backends``."""

from kway.backends import TITLES, backend_of
from kway.errors import UsageError


def usable_backend(device: str) -> str:
    """Return the name of the back end to make the process group of ranks on ``device`` with. Imports torch.

    Raises ``UsageError`` where this torch has none, or none but MPI: groups beside the first one are made over a store,
    which torch does not keep for MPI.
    """
    import torch.distributed as dist

    has = dist.is_available()
    name = backend_of(
        [device],
        {
            "gloo": has and dist.is_gloo_available(),
            "nccl": has and dist.is_nccl_available(),
            "mpi": has and dist.is_mpi_available(),
        },
    )
    if name == "mpi":
        needed = TITLES[backend_of([device])]
        raise UsageError(
            f"this torch has only MPI for ranks on {device}",
            "kway needs groups that meet through a store, which torch has none of with MPI",
            f"install a torch that has {needed}",
        )
    return name
