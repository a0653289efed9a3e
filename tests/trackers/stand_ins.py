"""Packages that bear the names of trackers, with the signatures that their documentation gives, as files to import."""

from pathlib import Path

# docs.wandb.ai/ref/python/init, .../run: init(...) -> Run; Run.log(data, step, commit); Run.finish(exit_code, quiet).
WANDB = """
calls = []


class Run:
    def log(self, data, step=None, commit=None):
        assert type(data) is dict
        if step is not None and calls[-1][0] == "log":
            assert step >= calls[-1][2], "steps must not become smaller"
        calls.append(("log", data, step))

    def finish(self, exit_code=None, quiet=None):
        calls.append(("finish", exit_code))


def init(
    entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None,
    config_exclude_keys=None, config_include_keys=None, allow_val_change=None, group=None, job_type=None, mode=None,
    force=None, anonymous=None, reinit=None, resume=None, resume_from=None, fork_from=None, save_code=None,
    tensorboard=None, sync_tensorboard=None, monitor_gym=None, settings=None,
):
    calls.append(("init", project, config))
    return Run()
"""

# mlflow.tracking.fluent: start_run, log_params, log_metrics and end_run; the active run is kept by thread.
MLFLOW = """
import re
import threading
from types import SimpleNamespace

calls = []
active = threading.local()
FAILS, REFUSES, stored = [], [], {}


def start_run(
    run_id=None, experiment_id=None, run_name=None, nested=False, parent_run_id=None, tags=None, description=None,
    log_system_metrics=None,
):
    assert getattr(active, "run", None) is None, "already active"
    active.run = SimpleNamespace(info=SimpleNamespace(run_id=run_id or "r1"))
    calls.append(("start", run_name, dict(tags or {})))
    return active.run


def log_params(params, synchronous=None, run_id=None):
    assert run_id == "r1" and len(params) <= 100
    if REFUSES:
        raise ConnectionError(REFUSES[0])
    for name, value in params.items():
        if stored.setdefault(name, str(value)) != str(value):
            raise ValueError(f"Changing param values is not allowed: {name}")
    calls.append(("params", params))


def log_metrics(metrics, step=None, synchronous=None, run_id=None, timestamp=None, model_id=None, dataset=None):
    assert run_id == "r1" and synchronous is False
    assert all(re.fullmatch(r"[\\w. /-]*", name) and isinstance(value, float) for name, value in metrics.items())
    calls.append(("metrics", metrics, step))
    return SimpleNamespace(wait=wait)


def wait():
    if FAILS:
        raise ConnectionError(FAILS[0])


def end_run(status="FINISHED"):
    assert status in ("FINISHED", "SCHEDULED", "FAILED", "KILLED")
    if active.run is not None:
        active.run = None
        calls.append(("end", status))
"""


def write(folder: Path) -> None:
    (folder / "wandb.py").write_text(WANDB)
    (folder / "mlflow.py").write_text(MLFLOW)
