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
    "--optimizer": ("optim", "optimiser", "opt"),
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


def meant_by(flag: str, known: Collection[str]) -> str | None:
    """Return the flag among ``known`` that is called ``flag`` elsewhere, or is spelled with ``_``; else ``None``."""
    name = flag.lstrip("-").lower().replace("_", "-")
    if f"--{name}" in known:
        return f"--{name}"
    return next((own for own, names in _ELSEWHERE.items() if name in names and own in known), None)
