"""Ranks as another launcher starts them: two processes that find each other by the environment."""

import os
import subprocess
import sys

from kway.launch.address import reserved_port


def on_two_ranks(*words: str) -> tuple[list[int], list[str]]:
    """Run ``python WORDS`` as rank 0 and as rank 1; return their exit codes and what each printed."""
    with reserved_port() as port:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        started = [
            subprocess.Popen(
                [sys.executable, *words],
                env={**os.environ, **meeting, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        printed = [process.communicate(timeout=90)[0] for process in started]
    return [process.returncode for process in started], printed
