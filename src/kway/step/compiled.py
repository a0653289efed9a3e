"""The model's training pass through torch.compile, in place: names, parameters, class and hooks stay as they are.

On a GPU, each by itself, a built-in loss and the small arithmetic around collectives too (``StepCore.compilable``).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import nn

from kway.data.share import Share
from kway.devices.compilers import keep_code
from kway.errors import KwayError
from kway.step.batchnorm import layers, seen_by_compiler
from kway.step.core import StepCore
from kway.step.formats import follow_weights
from kway.step.kinds import Runner
from kway.step.outcome import Outcome
from kway.step.pieces import in_pieces
from kway.step.tally import Tally

# Variants of one function of the model: one for each shape of a share and each layer that shares the function. torch
# gives up at 8 and runs on uncompiled without a word, which a network of equal blocks passes at its second shape.
MOST_VARIANTS = 64


class CompiledStep:
    """Takes the steps of ``inner`` while the model of ``core`` is compiled; outside of them it is the user's own.

    ``options``: of the compiler. ``pieces``: see ``open_kind``.
    """

    def __init__(
        self, core: StepCore, inner: Runner, options: dict[str, Any] | None = None, pieces: int | None = None
    ) -> None:
        self._model, self._inner = core.model, inner
        dynamo: Any = import_module("torch._dynamo")
        self._failed = dynamo.exc.BackendCompilerFailed
        if core.kept is not None:
            # Not as a part of compiled code, which would give it a buffer after all that the pass did to it.
            vars(core.kept)["registered"] = dynamo.disable(core.kept.registered)
        options = {**(options or {}), **_options()}
        cut = None if pieces is None else in_pieces(pieces, options)
        how: dict[str, Any] = {"options": options} if cut is None else {"backend": cut}
        # With the hooks, as nn.Module.compile does. Fixed shapes: there are few, and each gets code of its own.
        self._compiled = torch.compile(_seen(core.model), dynamic=False, **how)
        # Where launches cost: on a CPU it would take seconds to compile, and win nothing.
        launches = core.device.type == "cuda"
        self._small: list[tuple[Any, str, Any]] = [(core, "compiles", True)] if launches else []
        for owner, name, dynamic in core.compilable() if launches else ():
            function = torch.compile(getattr(owner, name), dynamic=dynamic, options=options)
            self._small.append((owner, name, _OrAsItIs(getattr(owner, name), function, self.notices)))

    @property
    def kind(self) -> str:
        """The step kind whose arithmetic steps have."""
        return "compiled" if self._inner.kind == "eager" else "compiled-graph"

    @property
    def ran(self) -> str:
        """The step kind that really ran so far."""
        return "compiled" if self._inner.ran == "eager" else "compiled-graph"

    @property
    def notices(self) -> list[str]:
        """Lines for the user: see ``kway.step.kinds.Runner``."""
        return self._inner.notices

    @property
    def at_the_end(self) -> list[str]:
        """Lines for the user where the run ends here: see ``kway.step.kinds.Runner``."""
        return self._inner.at_the_end

    def run(self, share: Share, step: int, tally: Tally | None = None) -> Outcome:
        """Take optimizer step number ``step``: see ``StepCore.run``.

        Raises ``KwayError`` where torch.compile fails on the model, or on the backward pass of a built-in loss.
        """
        # Evaluation and prediction have shapes of their own, which would each be compiled.
        with ExitStack() as undo:
            for owner, name, value in [(self._model, "_compiled_call_impl", self._compiled), *self._small]:
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            try:
                return self._inner.run(share, step, tally)
            except self._failed as error:
                cause = error.inner_exception
                raise KwayError(
                    f"torch.compile cannot compile the model or its loss: {type(cause).__name__}: {cause}",
                    "",
                    "use a step kind that does not compile: eager, or graph on a GPU",
                ) from error

    def forget(self) -> None:
        """Forget recordings; compiled code reads parameters where they are."""
        self._inner.forget()


class _OrAsItIs:
    """A small function, compiled, that is run as it is from then on where it turns out that it does not compile.

    What it holds is no part of what the host keeps of a step (``attributes``): it changes nothing but speed.
    """

    __slots__ = ("compiled", "notices", "plain")

    def __init__(self, plain: Callable[..., Any], compiled: Callable[..., Any], notices: list[str]) -> None:
        self.plain, self.notices = plain, notices
        self.compiled: Callable[..., Any] | None = compiled

    def __call__(self, *given: Any) -> Any:
        if self.compiled is None:
            return self.plain(*given)
        dynamo: Any = import_module("torch._dynamo")
        try:
            return self.compiled(*given)
        except dynamo.exc.TorchDynamoException as error:
            # First: what is wrong with the numbers themselves, it says too.
            found = self.plain(*given)
            cause = getattr(error, "inner_exception", error)
            said = next(iter(str(cause).splitlines()), "")
            self.notices.append(f"{_name_of(self.plain)} is not compiled: {type(cause).__name__}: {said}")
        self.compiled = None
        return found


def _name_of(function: Callable[..., Any]) -> str:
    return ".".join(getattr(function, part, "") for part in ("__module__", "__qualname__"))


def _seen(model: nn.Module) -> Callable[..., Any]:
    """Return the call of a model as the compiler takes it.

    It passes over functions of torch's own files, the forward of a container (``nn.Sequential``) among them, but looks
    into all that a function of another file calls.
    """
    call: Callable[..., Any] = model._call_impl
    rules: Any = import_module("torch._dynamo.trace_rules")
    if not rules.check(model.forward):
        return call

    def called(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return called


@contextmanager
def compiling(
    core: StepCore, inner: Runner, options: dict[str, Any] | None = None, pieces: int | None = None
) -> Iterator[Runner]:
    """While open, let steps of ``inner`` run with a compiled model.

    What kway put into the model that communicates, or that counts on the host, stays out of what is compiled; where a
    compiler can join kernels it sees batch normalisation over ranks (``kway.step.traced``).
    """
    # Where it is not set, torch chooses a folder as soon as its compiler is imported, which may have been long ago.
    folders: Any = import_module("torch._inductor.runtime.cache_dir_utils")
    keep_code(usual=folders.default_cache_dir() if hasattr(folders, "default_cache_dir") else None)
    config: Any = import_module("torch._dynamo.config")
    # Compiled code is kept by function, for all runs of a process: a hook that came later must not be passed over.
    # They reach this thread alone. Backward on a GPU runs on a thread of autograd's, where torch's own hold, the limit
    # of 8 among them. What is compiled there is only what layers that are computed again call by themselves, as the
    # small arithmetic: checkpoints are a part of compiled code, or are left out of it with all that is inside. Variants
    # that are there are used; a ninth that is first asked for there stays uncompiled, as do new ones after it.
    settings = config.patch(recompile_limit=MOST_VARIANTS, skip_nnmodule_hook_guards=False)
    with ExitStack() as undo, settings, _gradients_as_outputs():
        seen = set[nn.Module]()
        if sees_norms(core.device):
            seen = undo.enter_context(seen_by_compiler(core.model, core.device))
        for _, module in layers(core.model):
            if "forward" in vars(module) and module not in seen:
                _leave_out(module, "forward", undo)
        _leave_out(core.whole_batch, "gathered", undo)
        _leave_out(core.presence, "refuse_one_value", undo)
        follow_weights(core.model, undo)
        yield CompiledStep(core, inner, options, pieces)


def sees_norms(device: torch.device) -> bool:
    """Whether a compiler is to see how batch normalisation over ranks computes: where that joins kernels."""
    return device.type == "cuda"


def _gradients_as_outputs() -> AbstractContextManager[Any]:
    """While open, compiled code takes the gradient of an output as the output lies in memory, without a copy.

    The loss hands it over so. torch 2.11 expects it contiguous, and of a language model's scores, handed out with their
    classes in the second dimension, it would copy the gradient to and fro.
    """
    config: Any = import_module("torch._functorch.config")
    name = "guess_tangent_strides_as_outputs"
    return config.patch({name: True}) if hasattr(config, name) else nullcontext()


def _leave_out(owner: Any, name: str, undo: ExitStack) -> None:
    """Put the uncompiled form of a method on the instance until the end of ``undo``."""
    held = vars(owner)
    own = held.get(name)
    method: Any = getattr(owner, name)
    # A method too: whose it is says that it is kway's own (see ``stand_in_of``), and a copy of the layer gets its own.
    disable: Any = torch.compiler.disable
    bound = isinstance(method, MethodType)
    held[name] = MethodType(disable(method.__func__), method.__self__) if bound else disable(method)

    def restore() -> None:
        if own is None:
            del held[name]
        else:
            held[name] = own

    undo.callback(restore)


def _options() -> dict[str, Any]:
    """Return the compiler's options: where torch is to be deterministic, nothing is chosen by how long it takes."""
    config: Any = import_module("torch._inductor.config")
    wanted = torch.are_deterministic_algorithms_enabled() and hasattr(config, "deterministic")
    return {"deterministic": True} if wanted else {}
