"""What cuBLAS works in on a GPU: torch keeps it for each stream that it was used on, as long as the process lives."""

import torch


def without_workspaces() -> None:
    """Give it back. It is made anew when it is needed, and counts then as what a step takes.

    A private function of torch's, which calls it itself before it records compiled code; nothing where it is missing.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
