"""Work that steps are made of, done without a pause: large operations, and many small ones."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from kway.measuring.timer import Policy, Work
from kway.measuring.work import Call, waited

# A sample of what is done without a pause is so many times as long as others, a tenth of a second in a quick
# measurement, or as long as there is room for.
SUSTAINED = 50
# Rounds of such samples: one tells more than a short one.
ROUNDS = 5
_TRIED = 6
ALONE, AT_ONCE = "alone", "at once"


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of ``layers`` linear layers of ``width`` x ``width``, over ``rows`` samples."""

    width: int
    rows: int
    layers: int

    def make(self) -> Call:
        """Return a call that does both passes once."""
        # No random numbers: they would be drawn from the generator that the process has.
        layers = [nn.utils.skip_init(nn.Linear, self.width, self.width) for _ in range(self.layers)]  # type: ignore[no-untyped-call]
        model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
        inputs, held = torch.ones(self.rows, self.width), list(model.parameters())
        for parameter in held:
            nn.init.constant_(parameter, 1 / self.width)

        def call() -> None:
            for parameter in held:
                parameter.grad = None
            model(inputs).square().mean().backward()

        return call


LARGE, SMALL = "large operations", "small operations"
# Of the large ones the products take the time, and weights and gradients do not stay in the caches of a core; of the
# small ones starting them does.
KINDS = {LARGE: Passes(256, 128, 4), SMALL: Passes(32, 8, 12)}


def counts(most: int, every: bool) -> list[int]:
    """List the numbers of ranks, or threads, to measure: all, then 2, 3, ..., or 2, 4, 8, ..., fewer than all."""
    fewer = range(2, most) if every else (1 << k for k in range(1, most.bit_length()) if 1 << k < most)
    return [] if most < 2 else [most, *fewer]


def sustained(policy: Policy, candidates: int, times: float = SUSTAINED) -> Policy:
    """Return the policy for so many candidates: samples as long as there is room for, so that none is left out."""
    # Each is timed in rounds, a reference with them, and before that tried some times until its sample is long enough.
    room = policy.seconds / ((candidates + 1) * (policy.least_rounds + _TRIED))
    sample_s = max(policy.sample_s, min(room, times * policy.sample_s))
    return replace(policy, sample_s=sample_s, rounds=min(policy.rounds, ROUNDS))


def with_threads(make: Callable[[], Call], threads: int) -> Work:
    """Make work of a call that is done with so many threads of torch."""
    timed = waited(make(), lambda: None)

    def run(count: int) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return timed(count)
        finally:
            torch.set_num_threads(before)

    return run
