"""A plan as tests make one."""

from tests.planning.pricers import found

from kway.planned import Planned


def planned(result=None, **changes):
    result = found(256) if result is None else result
    fields = {
        "model": "example", "precision": "fp32", "level": "math", "scaling": "strong", "batch_size": 256,
        "candidates": result.rows, "chosen": result.chosen, "left": [each.to_dict() for each in result.left],
        "serial_fraction": result.serial_fraction, "serial_error": result.serial_error,
        "amdahl_bound": result.amdahl_bound,
        "history": {"checks": 0, "mean_error": None}, "workloads": [], "measurements": [],
        "machine": {"cpu": "a CPU", "gpus": []}, "versions": {}, "made": "2026-01-01T00:00:00+00:00", "seconds": 1.0,
    }  # fmt: skip
    return Planned(**{**fields, **changes})
