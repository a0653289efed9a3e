"""That threads copy as many bytes as their price says: counted where ``kway.comm.threads`` hands tensors on."""

import threading

import pytest
import torch
from tests.measured import usual
from tests.workloads import workload

from kway.comm import threads as handing
from kway.comm.threads import ThreadGroup
from kway.launch import threads
from kway.launch.shared_process import SharedProcess
from kway.step.process_wide import drawing, held
from kway.strategies.pricing import priced

# Bytes a second of a copy in ``usual()``, whatever the size.
RATE = 1e9
TERM = "gather and scatter (threads)"


@pytest.fixture
def read(monkeypatch):
    """Return a list of the bytes that ranks read of what others, or they themselves, have laid down."""
    found, lock = [], threading.Lock()
    on = handing._Handed.on

    def counted(self, device, part=slice(None)):
        piece = on(self, device, part)
        with lock:
            found.append(piece.nbytes)
        return piece

    monkeypatch.setattr(handing._Handed, "on", counted)
    return found


def meet(size, task):
    process = SharedProcess(size, held, drawing)
    threads.run(lambda rank: task(ThreadGroup(process, rank, size)), process)


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_sum_copies_three_times_its_bytes(read, replicas):
    count = 1 << 16
    meet(replicas, lambda group: group.sum_(torch.ones(count)))
    # Each reads a slice of all and all slices; what it lays down first is the third time.
    copies = 1 + sum(read) / (replicas * 4 * count)
    assert copies == 3
    parameters = {**workload().parameters, "gradient_bytes": 4 * count}
    assert price(replicas, parameters=parameters, collectives=[]) == pytest.approx(copies * 4 * count / RATE)


@pytest.mark.parametrize("replicas", [2, 4])
def test_another_collective_reads_what_all_have_laid_down(read, replicas):
    meet(replicas, lambda group: group.stack(torch.ones(1 << 10)))
    each = sum(read) / replicas
    assert each == replicas * 4 << 10
    call = {"when": "forward", "what": "all-gather", "bytes": 4 << 10, "times": 3}
    more = price(replicas, collectives=[call]) - price(replicas, collectives=[])
    assert more == pytest.approx(3 * each / RATE)


def price(replicas, **known):
    made = priced({"threads": replicas}, ["cpu"] * replicas, "eager", workload(**known), usual(), threads=1)
    return made.terms[TERM]
