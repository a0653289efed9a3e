"""A small workload for tests, of which every number is known: times are lines, bytes are round."""

from collections.abc import Iterable
from typing import Any

from kway.workload import Workload

FIXED_S, PER_SAMPLE_S = 1e-3, 1e-4


def workload(
    shares: Iterable[int] = (32, 64, 128),
    *,
    step_kind: str = "eager",
    devices: int = 1,
    threads: Iterable[int] = (1,),
    fixed_s: float = FIXED_S,
    per_sample_s: float = PER_SAMPLE_S,
    **changes: Any,
) -> Workload:
    """Return a workload whose step takes ``fixed_s + per_sample_s * samples`` with any number of threads,
    and is that of one of ``devices``.

    Forward is 30 % of a step, backward 60 %, the optimizer 5 %, input 5 %. A thousand fp32 parameters of a
    layer ``fc``, and one batch normalisation that gathers 64 bytes forward and adds up 32 backward.
    """
    shares, threads = tuple(shares), tuple(threads)
    parts = {"step": 1.0, "forward": 0.3, "backward": 0.6, "optimizer": 0.05, "input": 0.05}
    lines = {part: (fixed_s * piece, per_sample_s * piece) for part, piece in parts.items()}
    fields: dict[str, Any] = {
        "model": "example",
        # As of one whose first run tells what it is: of any model that a test has.
        "identity": {"parameters": None, "code": ""},
        "device": "cpu",
        "device_name": "simulated CPU",
        "machine": {},
        "versions": {"torch": "2.11"},
        "precision": "fp32",
        "level": "math",
        "made": "2026-01-01T00:00:00+00:00",
        "batch_size": max(shares),
        "samples": 10_000,
        "sample_bytes": 3_144,
        "flop_per_sample": 6_000.0,
        "optimizer": "SGD",
        "parameters": {
            "count": 1_000,
            "bytes": 4_000,
            "trainable_count": 1_000,
            "gradient_bytes": 4_000,
            "optimizer_bytes": 4_000,
            "buffer_bytes": 80,
            "tied": [],
        },
        "gradients": {"float32": 1_000},
        "memory": {
            "activation_bytes_per_sample": 2_000.0,
            "activation_fixed_bytes": 500.0,
            "workspace_bytes": 0,
            "checkpointed_activation_bytes_per_sample": 800.0,
            "peak": [
                {
                    "step_kind": step_kind,
                    "devices": devices,
                    "samples": share,
                    # Gradients come as activations go; those of several lie in vectors of their own as well.
                    "bytes": 8_080 + 500 + 2_000 * share + 4_000 * (devices > 1),
                }
                for share in shares
            ],
        },
        "timings": [
            {
                "step_kind": step_kind,
                "threads": count,
                "devices": devices,
                "samples": share,
                "part": part,
                "seconds": fixed + each * share,
                "spread": 0.02,
                "step_spread": 0.03 if part == "step" else None,
            }
            for count in threads
            for share in shares
            for part, (fixed, each) in lines.items()
        ],
        "fits": [
            {
                "step_kind": step_kind,
                "threads": count,
                "several": devices > 1,
                "part": part,
                "fixed_s": fixed,
                "per_sample_s": each,
                "error": 0.0,
            }
            for count in threads
            for part, (fixed, each) in lines.items()
        ],
        "layers": [
            {
                "name": "fc",
                "type": "Linear",
                "parameters": 1_000,
                "parameter_bytes": 4_000,
                "flop_per_sample": 6_000.0,
                "activation_bytes_per_sample": 2_000.0,
                "forward": dict(zip(("fixed_s", "per_sample_s"), lines["forward"], strict=True)),
                "backward": dict(zip(("fixed_s", "per_sample_s"), lines["backward"], strict=True)),
                "bound": "compute",
                "why": "an example",
            }
        ],
        "collectives": [
            {"when": "forward", "what": "all-gather", "bytes": 64, "times": 1},
            {"when": "backward", "what": "all-reduce", "bytes": 32, "times": 1},
        ],
    }
    return Workload(**{**fields, **changes})
