"""A training step of the example model ``gpt`` as a careful engineer writes it, without kway's step."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from settings import Setting, optimizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

COMPILED = ("whole", "apart", "blocks", "none")
BUCKET_BYTES = 25 * 2**20
WARM_UP = 3


class WithLoss(nn.Module):
    """The model and its loss as one module: a scalar from tokens and what follows each, both (N, T)."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        """Return the mean over all tokens."""
        return self.loss(self.model(tokens), following)


class Buckets:
    """Means of gradients over all ranks, in buckets that are sent as soon as backward has completed them."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._buckets: list[tuple[list[nn.Parameter], list[Tensor], Tensor]] = []
        self._missing: list[int] = []
        self._works: list[Any] = []
        held: list[nn.Parameter] = []
        for parameter in reversed(parameters):
            held.append(parameter)
            if sum(each.numel() for each in held) * 4 >= BUCKET_BYTES:
                self._close(held)
                held = []
        if held:
            self._close(held)
        self._missing = [len(parameters) for parameters, *_ in self._buckets]

    def _close(self, held: list[nn.Parameter]) -> None:
        number = len(self._buckets)
        whole = held[0].new_zeros(sum(each.numel() for each in held))
        views = [
            part.view_as(each)
            for part, each in zip(whole.split([each.numel() for each in held]), held, strict=True)
        ]
        self._buckets.append((held, views, whole))
        for parameter in held:
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._ready(number))

    def _ready(self, number: int) -> None:
        self._missing[number] -= 1
        # In one order on all ranks: a bucket waits for those before it.
        while len(self._works) < len(self._buckets) and not self._missing[len(self._works)]:
            parameters, views, whole = self._buckets[len(self._works)]
            torch._foreach_copy_(views, [each.grad for each in parameters])
            self._works.append(dist.all_reduce(whole, dist.ReduceOp.AVG, async_op=True))

    def wait(self) -> None:
        """Wait for what was sent, in the device's order, and leave the means on the parameters."""
        for work in self._works:
            work.wait()
        for parameters, views, _ in self._buckets:
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view
        self._works = []
        self._missing = [len(parameters) for parameters, *_ in self._buckets]


class ByHand:
    """Takes steps: bf16 autocast, fused AdamW, rows that lie on the device in an order that is drawn for an epoch.

    ``kind``: whether the step is captured. On several ranks a captured step has ``Buckets``, another one DDP.
    ``count``: the model's parameters.
    """

    def __init__(self, setting: Setting, device: torch.device, kind: str, compiled: str) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if ranks > 1 else 0
        torch.manual_seed(0)
        model = setting.model()().to(device)
        self.count = sum(parameter.numel() for parameter in model.parameters())
        self._device, self._setting = device, setting
        self._rows = setting.data(ranks).windows[rank::ranks].to(device)
        self._order: Iterator[Tensor] = iter(())
        self._epoch = 0
        captured = kind in ("graph", "compiled-graph")
        self._buckets = Buckets(list(model.parameters())) if captured and ranks > 1 else None
        self._net = made(model, compiled, [rank] if ranks > 1 and not captured else None, device)
        self._optimizer = optimizer(model.parameters(), device.type == "cuda")
        for group in self._optimizer.param_groups:
            group["capturable"] = captured
        self._batch = [
            torch.zeros(setting.batch, setting.length, dtype=torch.int64, device=device) for _ in range(2)
        ]
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self._work: Callable[[], Tensor] = self._capture() if captured else self._compute

    def step(self) -> Tensor:
        """Take a step over the next rows; return the loss, on the device."""
        rows = self._rows[self._next()].to(torch.int64)
        self._batch[0].copy_(rows[:, :-1])
        self._batch[1].copy_(rows[:, 1:])
        return self._work()

    def _next(self) -> Tensor:
        found = next(self._order, None)
        if found is None:
            order = torch.randperm(len(self._rows), device=self._device)
            self._order = iter(order.split(self._setting.batch))
            found = next(self._order)
        return found

    def _compute(self) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        # On a CPU, which only shows that all of it runs, it would be slow.
        with torch.autocast("cuda", torch.bfloat16, enabled=self._device.type == "cuda"):
            loss: Tensor = self._net(*self._batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._buckets is not None:
            self._buckets.wait()
        self._optimizer.step()
        self.total += loss.detach()
        return loss.detach()

    def _capture(self) -> Callable[[], Tensor]:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._compute()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # A watchdog of the collectives may look at its events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss = self._compute()

        def again() -> Tensor:
            graph.replay()
            return loss

        return again


def made(model: nn.Module, compiled: str, devices: list[int] | None, device: torch.device) -> Any:
    """Return model and loss, compiled as ``COMPILED`` says. ``devices``: of DDP, ``None`` without it."""
    loss: Any = F.cross_entropy
    if compiled in ("apart", "blocks"):
        loss = torch.compile(loss, dynamic=False)
        for each in [model] if compiled == "apart" else model.blocks:
            each.compile(dynamic=False)
    net: nn.Module = WithLoss(model, loss)
    if devices is not None:
        ids = devices if device.type == "cuda" else None
        net = DistributedDataParallel(net, ids, gradient_as_bucket_view=True)
    return torch.compile(net, dynamic=False) if compiled == "whole" else net
