"""Flags as other tools call them, for those who bring their habits along."""

from collections.abc import Collection

# Kway's own flag, and what it is called elsewhere: by Lightning, Transformers, Accelerate, DeepSpeed, torchrun and
# usual scripts.
_ELSEWHERE = {
    "--lr": ("learning-rate", "base-lr", "lrate"),
    "--batch-size": ("batch", "bs", "train-batch-size", "global-batch-size", "b"),
    "--batch-size-per-device": (
        "per-device-train-batch-size",
        "per-gpu-train-batch-size",
        "micro-batch-size-per-gpu",
    ),
    "--micro-batch": ("micro-batch-size",),
    "--epochs": ("epoch", "max-epochs", "num-epochs", "num-train-epochs", "n-epochs"),
    "--steps": ("max-steps", "num-steps", "iterations", "max-iters"),
    "--devices": (
        "gpus", "gpu", "device", "num-gpus", "gpu-ids", "num-processes", "nproc-per-node", "nproc", "world-size",
    ),
    "--workers": ("num-workers", "dataloader-num-workers", "num-loader-workers"),
    "--seed": ("seed-everything", "random-seed", "manual-seed", "set-seed"),
    "--precision": ("dtype", "mixed-precision", "amp", "fp16", "bf16"),
    "--optimizer": ("optim", "optimiser", "opt", "momentum", "nesterov"),
    "--loss": ("criterion", "loss-fn", "loss-function"),
    "--data": ("dataset", "dataset-name"),
    "--data-dir": ("data-path", "data-root", "root"),
    "--out": ("output", "output-dir", "out-dir", "save-dir", "default-root-dir", "work-dir", "o"),
    "--init": ("init-weights", "model-name-or-path"),
    "--clip-norm": ("gradient-clip-val", "max-grad-norm", "clip-grad-norm", "grad-clip", "clip-grad"),
    "--ema": ("ema-decay", "model-ema"),
    "--checkpoint-every": ("save-every", "save-steps", "save-interval", "save-freq"),
    "--keep": ("save-total-limit", "save-top-k"),
    "--resume-from": ("resume-from-checkpoint", "ckpt-path", "load-checkpoint"),
    "--validate-every": ("eval-every", "eval-steps", "eval-interval", "val-every", "check-val-every-n-epoch"),
    "--log-every": ("log-interval", "logging-steps", "log-every-n-steps", "print-freq"),
    "--early-stop": ("early-stopping", "early-stopping-monitor"),
    "--tracker": ("logger", "report-to", "wandb", "tensorboard", "mlflow"),
    "--weights": ("checkpoint", "ckpt", "model-path"),
    "--step-kind": ("compile", "torch-compile"),
}  # fmt: skip

# What elsewhere is a flag and here a part of a job in a file of the user's own, and how flags for it are called.
_IN_A_JOB = {
    "a schedule of the learning rate is part of a Job, as schedule=": (
        "schedule", "scheduler", "lr-schedule", "lr-scheduler", "lr-scheduler-type", "sched", "max-lr", "min-lr",
        "lr-min", "lr-decay", "lr-decay-rate", "lr-gamma", "gamma", "lr-step-size", "lr-drop", "lr-milestones",
        "milestones", "warmup", "warmup-steps", "warmup-ratio", "warmup-epochs", "lr-warmup-steps", "lr-warmup-epochs",
        "cosine", "one-cycle", "onecycle",
    ),
    "options of an optimizer are part of a Job, as optimizer=": (
        "weight-decay", "wd", "betas", "beta1", "beta2", "eps", "adam-beta1", "adam-beta2",
        "adam-epsilon",
    ),
}  # fmt: skip


def in_a_job(flag: str) -> str | None:
    """Return what ``flag`` is for and where it stands instead; ``None`` for other flags."""
    name = _bare(flag)
    return next((what for what, names in _IN_A_JOB.items() if name in names), None)


def meant_by(flag: str, known: Collection[str]) -> str | None:
    """Return the flag among ``known`` that is called ``flag`` elsewhere, or is spelled with ``_``; else ``None``."""
    name = _bare(flag)
    if f"--{name}" in known:
        return f"--{name}"
    return next((own for own, names in _ELSEWHERE.items() if name in names and own in known), None)


def _bare(flag: str) -> str:
    return flag.lstrip("-").lower().replace("_", "-")
