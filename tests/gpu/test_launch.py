"""Processes on GPUs: they end when they must, and a user's script finds its card whoever starts it."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import kway

pytestmark = [pytest.mark.gpu, pytest.mark.starts]

CARD = 1
GONE_WITHIN_S = 10.0
SLACK = 64 << 20

SCRIPT = """
import sys
from functools import partial
import torch
from torch import nn
import kway

draw = torch.Generator().manual_seed(0)
data = torch.randn(29, 6, generator=draw), torch.randint(3, (29,), generator=draw)
job = kway.Job(
    model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)),
    loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=0.1), data=data, batch_size=13,
    precision="fp64",
)
with kway.parallel(job) as p:
    for epoch in range(2):
        for batch in p.batches(epoch):
            p.step(batch)
    seen = p.gather(str(next(p.model.parameters()).device))
    p.save(sys.argv[1])
    p.print("ranks", p.size, "on", *seen)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(*words, **variables):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return next(line for line in done.stdout.splitlines() if "ranks" in line)


def weights(folder):
    return load_file(Path(folder) / "weights.safetensors")


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=name)


def test_auto_takes_all_gpus(script, tmp_path, leftovers):
    count = torch.cuda.device_count()
    said = run("-m", "kway", "launch", script, tmp_path / "all")
    cards = " ".join(f"cuda:{rank}" for rank in range(count))
    assert said.endswith(f"ranks {count} on {cards}" if count > 1 else "ranks 1 on cuda:0")
    run("-m", "kway", "launch", "--devices", "cuda:0", script, tmp_path / "one")
    assert_same(weights(tmp_path / "all"), weights(tmp_path / "one"))
    assert not leftovers()


def test_torchrun_is_joined_on_its_gpus(script, tmp_path, two, leftovers):
    del two
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert run(*torchrun, script, tmp_path / "torchrun").endswith("ranks 2 on cuda:0 cuda:1")
    run(script, tmp_path / "plain", CUDA_VISIBLE_DEVICES="0")
    assert_same(weights(tmp_path / "torchrun"), weights(tmp_path / "plain"))
    assert not leftovers()


def test_chosen_gpus_are_the_ones_that_are_used(script, tmp_path, two):
    """In the order given: the rank's cuda:0 is the machine's second GPU."""
    del two
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import os, torch\n"
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "p = torch.cuda.get_device_properties(torch.cuda.current_device())\n"
        "print('ranks', os.environ['RANK'], p.uuid, flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "kway", "launch", "--devices", "cuda:1,0", str(probe)],
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(line.split("ranks ")[1].split() for line in done.stdout.splitlines() if "ranks " in line)
    assert found == {str(rank): str(torch.cuda.get_device_properties(1 - rank).uuid) for rank in (0, 1)}


def doomed(end):
    """A job whose rank 1 meets its end in the third batch that it sees."""
    calls = []

    def loss(output, target):
        calls.append(1)
        if len(calls) == 3 and os.environ.get("RANK") == "1":
            end()
        return nn.functional.cross_entropy(output, target, reduction="none")

    draw = torch.Generator().manual_seed(0)
    return kway.Job(
        model=lambda: nn.Linear(6, 3),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(torch.randn(130, 6, generator=draw), torch.randint(3, (130,), generator=draw)),
        batch_size=13,
    )


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fault():
    raise ArithmeticError("this rank has had enough")


def memory_back(free):
    """Wait until the card has (nearly) as much free memory as before."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while torch.cuda.mem_get_info(CARD)[0] < free - SLACK and time.monotonic() < deadline:
        time.sleep(0.1)
    return torch.cuda.mem_get_info(CARD)[0] >= free - SLACK


@pytest.mark.parametrize(("end", "code", "words"), [(die, 137, "SIGKILL"), (fault, 1, "had enough")])
def test_a_rank_that_fails_ends_the_job_and_gives_the_gpus_back(two, leftovers, end, code, words):
    free = torch.cuda.mem_get_info(CARD)[0]
    steps = []

    def listen(event, record):
        if event == "step":
            steps.append((record["step"], time.monotonic()))

    with pytest.raises(kway.RankError) as caught:
        kway.train(doomed(end), devices=two, epochs=3, log_every=1, callbacks=[listen])
    assert steps, "no step was taken before the end"
    # From the last step that was heard of: starting the ranks takes longer than their end may.
    assert time.monotonic() - steps[-1][1] < GONE_WITHIN_S
    assert caught.value.rank == 1
    assert caught.value.exit_code == code
    assert words in str(caught.value)
    assert not leftovers()
    assert memory_back(free), "memory of the second card is still taken"


def test_after_a_failed_job_the_next_one_runs(two):
    with pytest.raises(kway.RankError):
        kway.train(doomed(die), devices=two, epochs=1)
    assert kway.train(doomed(lambda: None), devices=two, epochs=1).record.steps == 10
