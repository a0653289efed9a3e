"""A run is started again after a death, never after what the user's code did: that would only come again."""

import contextlib
import signal

import pytest
import torch
import torch.distributed as dist

from kway.errors import RankError, RefusedError, StallError
from kway.jobs.adapting import Adapting
from kway.jobs.place import place
from kway.jobs.restarting import Restarts, run_again
from kway.launch.failure import explained, of_exception, of_exit_status, to_error
from kway.world import StopRequest

GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:554] Connection closed by peer [127.0.0.1]:16006"
)
MISMATCH = (
    "Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?"
)


def raised(error):
    """What the parent of the ranks raises where rank 1 raises ``error``."""
    try:
        raise error
    except BaseException as caught:
        return to_error(of_exception(1, caught))


def aborted(what):
    written = f"terminate called after throwing an instance of 'X'\n  what():  {what}\n\nframe #0: main\n"
    return to_error(explained(of_exit_status(1, -signal.SIGABRT), written))


def tries(error):
    """How often a run on 3 devices is started where the first start ends with ``error``."""
    started = []

    def once(where, number):
        started.append(where.plan.devices)
        if number == 0:
            raise error
        return []

    where = place("cpu:3", "auto", "math", 8)
    with contextlib.suppress(RankError):
        run_again(where, once, Restarts(1), 8, lambda text: None, StopRequest())
    return started


@pytest.mark.parametrize(
    "error",
    [
        raised(SystemExit(42)),
        raised(SystemExit(0)),
        raised(SystemExit("NCCL")),
        to_error(of_exit_status(1, 0)),
        to_error(of_exit_status(1, 42)),
        raised(ConnectionResetError("Connection reset by peer: my data base")),
        raised(ValueError("NCCL is what I read")),
        raised(RuntimeError("my CUDA error, or Connection closed by peer")),
        raised(torch.AcceleratorError("CUDA error: device-side assert triggered")),
        aborted(MISMATCH),
        to_error(of_exit_status(1, -signal.SIGABRT)),
    ],
    ids=lambda error: error.cause[:40],
)
def test_what_the_users_code_does_is_no_death(error):
    assert tries(error) == [3]


@pytest.mark.parametrize(
    "error",
    [
        to_error(of_exit_status(1, -signal.SIGKILL)),
        StallError(1, 1, "is late"),
        raised(RuntimeError(GLOO)),
        raised(RuntimeError("CUDA error: uncorrectable ECC error encountered")),
        raised(torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")),
        raised(dist.DistBackendError("NCCL error: remote process exited or there was a network error")),
        aborted("Process group watchdog thread terminated with exception: CUDA error: unknown error"),
    ],
    ids=lambda error: error.cause[:40],
)
def test_a_rank_that_dies_or_loses_its_device_or_peers_is_gone_on_without(error):
    assert tries(error) == [3, 2]


def test_a_rank_that_aborted_says_why():
    assert str(aborted(MISMATCH)) == f"rank 1 failed: its process was killed by SIGABRT: {MISMATCH}"


def test_a_refusal_that_no_adaption_led_to_is_raised_as_it_is():
    refused = RefusedError("this", "is not kept")

    def once(where, number):
        raise refused

    adapting = Adapting(True, None, 4)
    where = place("cpu:1", "auto", "math", 8)
    with pytest.raises(RefusedError) as caught:
        run_again(where, once, Restarts(), 8, print, StopRequest(), adapting)
    assert caught.value is refused
    assert caught.value.__cause__ is None
