"""What can be chosen about a step beside its kind without changing what it computes but for rounding: plain data."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import nn

from kway.errors import RefusedError, UsageError
from kway.job import Job
from kway.registry import known
from kway.step.recompute import left_alone, recompute
from kway.units import shown

Tensor = torch.Tensor

# By name, the options of torch's compiler. More than the first takes minutes for a large model.
COMPILE_MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "searched": {"coordinate_descent_tuning": True},
    "max-autotune": {"max_autotune": True, "coordinate_descent_tuning": True},
}
MEMORY_FORMATS = ("contiguous", "channels_last")
OPTIMIZER_FORMS = ("foreach", "fused")
ATTENTIONS = ("default", "cudnn")
MIB = 2**20
# More threads than a machine has processors, and larger buckets than it has memory, are mistakes.
MOST_THREADS, MOST_MIB, MOST_SAMPLES = 1_024, 2**30, 10**18 - 1


@dataclass(frozen=True)
class Settings:
    """``None`` leaves a thing as model, job and torch have it.

    ``memory_format``: strides of parameters with four dimensions while the run lasts. ``optimizer``: how torch's own
    optimizers go over parameters: ``foreach`` or ``fused``. ``attention``: which kernel of
    ``scaled_dot_product_attention`` comes first on a GPU. ``autotune``: whether cuDNN times its algorithms for each
    shape. ``compile_mode``: see ``COMPILE_MODES``. ``bucket_mib``: size of a bucket of gradients. ``overlap``: whether
    compiled code is cut where a bucket is full, so that backward hands over gradients before it ends. ``threads``:
    of a CPU rank inside an operation; at level bits it is one. ``recompute``: whether the model's blocks keep their
    inputs alone, and are computed again in backward: memory for time (``kway.step.recompute``).
    ``micro_batch``: the most samples a device computes at once, where the job has no smaller one.
    """

    memory_format: str | None = None
    optimizer: str | None = None
    attention: str | None = None
    autotune: bool | None = None
    compile_mode: str | None = None
    bucket_mib: float | None = None
    overlap: bool | None = None
    threads: int | None = None
    recompute: bool | None = None
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        """Refuse names and sizes that nothing is known of."""
        for what, values in (
            ("memory_format", MEMORY_FORMATS),
            ("optimizer", OPTIMIZER_FORMS),
            ("attention", ATTENTIONS),
            ("compile_mode", COMPILE_MODES),
        ):
            value = getattr(self, what)
            if value is not None:
                known(what.replace("_", " "), value, dict.fromkeys(values))
        for what in ("autotune", "overlap", "recompute"):
            if not any(getattr(self, what) is value for value in (None, True, False)):
                raise UsageError(f"{what}={shown(getattr(self, what))}", "it must be true, false or null")
        for what in ("threads", "micro_batch"):
            count = getattr(self, what)
            most = MOST_THREADS if what == "threads" else MOST_SAMPLES
            whole = isinstance(count, int) and not isinstance(count, bool)
            if count is not None and not (whole and 0 < count <= most):
                need = f"from 1 to {most:,}" if what == "threads" else "of at least 1, below 1e+18"
                raise UsageError(f"{what}={shown(count)}", f"it must be a whole number {need}")
        size = self.bucket_mib
        if size is not None and (
            isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < MOST_MIB
        ):
            raise UsageError(
                f"bucket_mib={shown(size)}", f"it must be a number greater than 0, below {MOST_MIB:,}"
            )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Make settings of plain values by name. Raises ``UsageError`` for names that nothing is known of."""
        names = {entry.name: entry for entry in fields(cls)}
        for name in values:
            known("setting", name, names)
        return cls(**values)

    def named(self) -> dict[str, Any]:
        """Return what is chosen, by name."""
        return {
            entry.name: value for entry in fields(self) if (value := getattr(self, entry.name)) is not None
        }

    def on(self, job: Job) -> Job:
        """Return the job with what of it is chosen here. Of two sizes of micro-batches the smaller one counts."""
        if self.micro_batch is None:
            return job
        return replace(job, micro_batch=min(self.micro_batch, job.micro_batch or self.micro_batch))

    @property
    def bucket_bytes(self) -> int | None:
        """The size of a bucket in bytes, ``None`` for the usual one."""
        return None if self.bucket_mib is None else int(self.bucket_mib * MIB)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The options of torch's compiler."""
        return dict(COMPILE_MODES[self.compile_mode or "default"])

    @contextmanager
    def in_torch(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        """While open, torch and ``model`` are as the settings say."""
        with ExitStack() as undo:
            if self.autotune is not None:
                before = torch.backends.cudnn.benchmark
                torch.backends.cudnn.benchmark = self.autotune
                undo.callback(setattr, torch.backends.cudnn, "benchmark", before)
            if self.threads is not None and device.type == "cpu":
                undo.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(self.threads)
            if self.attention == "cudnn" and device.type == "cuda":
                attention: Any = torch.nn.attention
                undo.enter_context(
                    attention.sdpa_kernel(_cudnn_first(attention.SDPBackend), set_priority=True)
                )
            if self.memory_format is not None:
                _lay_out(model, self.memory_format, undo)
            if self.recompute and not recompute(model, undo):
                raise _no_blocks(model)
            yield

    def check_model(self, model: nn.Module) -> None:
        """Raise ``UsageError`` for a model that has none of the parts which a setting is about."""
        if self.recompute and not left_alone(model):
            raise _no_blocks(model)

    def prefer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let an optimizer of torch's own go over its parameters as the settings say, where its maker left that open.

        Others are returned as they are.
        """
        if self.optimizer is None or not takes_form(optimizer, self.optimizer):
            return optimizer
        for group in [optimizer.defaults, *optimizer.param_groups]:
            group["fused"], group["foreach"] = self.optimizer == "fused", self.optimizer == "foreach"
        return optimizer


def _no_blocks(model: nn.Module) -> UsageError:
    return UsageError(
        f"recompute with a {type(model).__name__} that has no blocks",
        "a list (nn.ModuleList, nn.Sequential) of several parts of one class is needed",
        "call torch.utils.checkpoint in the model where it keeps too much",
    )


AS_IT_IS = Settings()


def check_settings(settings: Settings, level: str) -> None:
    """Raise ``RefusedError`` for what level bits fixes itself."""
    for name in ("threads", "autotune", "micro_batch") if level == "bits" else ():
        if getattr(settings, name) is not None:
            raise RefusedError(
                f"{name}={getattr(settings, name)} at exactness bits",
                "there a shard is computed whole, on one thread, by algorithms that repeat themselves",
                f"leave {name} out",
            )


def takes_form(optimizer: torch.optim.Optimizer, form: str) -> bool:
    """Whether an optimizer can go over its parameters as ``form`` says, and nobody has chosen for it."""
    if not type(optimizer).__module__.startswith("torch.optim.") or form not in optimizer.defaults:
        return False
    groups = [optimizer.defaults, *optimizer.param_groups]
    if any(group.get("fused") is not None or group.get("foreach") is not None for group in groups):
        return False
    if any(group.get("differentiable") or isinstance(group["lr"], Tensor) for group in groups):
        return False
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return form != "fused" or all(parameter.is_floating_point() for parameter in held)


def _cudnn_first(kinds: Any) -> list[Any]:
    """Return the attention kernels that are on, cuDNN's before them."""
    cuda = torch.backends.cuda
    others = (
        (kinds.FLASH_ATTENTION, cuda.flash_sdp_enabled()),  # type: ignore[no-untyped-call]
        (kinds.EFFICIENT_ATTENTION, cuda.mem_efficient_sdp_enabled()),  # type: ignore[no-untyped-call]
        (kinds.MATH, cuda.math_sdp_enabled()),  # type: ignore[no-untyped-call]
    )
    return [kinds.CUDNN_ATTENTION, *(kind for kind, is_on in others if is_on)]


def _lay_out(model: nn.Module, name: str, undo: ExitStack) -> None:
    """Give parameters and buffers with four dimensions the strides of a format; ``undo`` gives back their own."""
    formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    chosen = formats[name]
    held = [*model.parameters(), *model.buffers()]
    sharing = Counter(map(_storage, held))
    for tensor in held:
        if tensor.dim() != 4 or tensor.is_contiguous(memory_format=chosen):
            continue
        own = next((each for each in formats.values() if tensor.is_contiguous(memory_format=each)), None)
        alone = tensor.untyped_storage().nbytes() == tensor.nbytes and sharing[_storage(tensor)] == 1
        if own is None or not alone:
            # A view of something else, or one of several, which a copy would part.
            continue
        tensor.data = tensor.data.contiguous(memory_format=chosen)
        undo.callback(_give_back, tensor, own)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _give_back(tensor: Tensor, memory_format: torch.memory_format) -> None:
    tensor.data = tensor.data.contiguous(memory_format=memory_format)
