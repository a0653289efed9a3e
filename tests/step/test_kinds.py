"""Step kinds: which there are, what they need, and what is said where one cannot be had."""

from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kway
from kway.devices import compilers
from kway.errors import RefusedError, UsageError
from kway.jobs.place import choose
from kway.jobs.restarting import without
from kway.step.deterministic import bits_hold_within
from kway.step.kinds import KINDS, check_kind, kind_of, open_kind
from kway.training.facts import check_within

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, 3, generator=G), torch.arange(10) % 2


def job():
    return kway.Job(
        partial(nn.Linear, 3, 2),
        nn.CrossEntropyLoss(),
        partial(torch.optim.SGD, lr=0.1),
        data=(X, Y),
        batch_size=5,
    )


def test_an_unknown_kind_is_told_the_nearest_one():
    with pytest.raises(UsageError, match=r"unknown step kind 'compild': known are compiled, .*'compiled'"):
        kind_of("compild")


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_that_records_needs_a_cuda_device(name):
    assert check_kind(name, ["cuda:0", torch.device("cuda", 1)]) is KINDS[name]
    if KINDS[name].records:
        with pytest.raises(RefusedError, match=f"step kind {name} on cpu: it needs a CUDA device"):
            check_kind(name, ["cpu"])
    else:
        assert check_kind(name, ["cpu"]) is KINDS[name]


@pytest.mark.parametrize("act", [kway.train, kway.prove])
def test_a_recorded_step_on_cpus_is_refused_before_anything_starts(act, tmp_path):
    with pytest.raises(RefusedError, match="use eager or compiled"):
        act(
            job(),
            devices="cpu:2",
            step_kind="graph",
            out=tmp_path / "run",
            ranks=SimpleNamespace(run=pytest.fail),
        )
    assert not (tmp_path / "run").exists()


def test_an_own_loop_is_refused_it_too():
    with pytest.raises(RefusedError, match="needs a CUDA device"), kway.parallel(job(), step_kind="graph"):
        pass


def test_eager_is_the_step_itself():
    core = SimpleNamespace(device=torch.device("cpu"), run=lambda *given: given)
    runner = open_kind("eager", core, ExitStack())
    assert runner.run("share", 3, "tally") == ("share", 3, "tally")
    assert (runner.kind, runner.notices) == ("eager", [])


def test_without_a_compiler_a_run_goes_on_eagerly_and_says_so(monkeypatch):
    monkeypatch.setattr("kway.step.kinds.missing", lambda kind: f"no compiler for {kind}")
    run = kway.train(job(), devices="cpu:1", epochs=1, step_kind="compiled")
    assert run.record.step_kind == "eager"
    assert run.plan.step_kind == "compiled"
    assert "the model is not compiled: no compiler for cpu" in run.record.notices
    proof = kway.prove(job(), devices="cpu:1", step_kind="compiled")
    assert proof.step_kind == proof.candidates[0]["step_kind"] == "eager"
    assert "the model is not compiled: no compiler for cpu" in proof.notices


def test_an_own_loop_hears_of_it_once(monkeypatch, capsys):
    monkeypatch.setattr("kway.step.kinds.missing", lambda kind: "no compiler")
    with kway.parallel(job(), devices="cpu:1", step_kind="compiled") as p:
        for share in p.batches(0):
            p.step(share)
        assert p.step_kind == "eager"
    assert capsys.readouterr().err.count("the model is not compiled: no compiler") == 1


def test_bits_do_not_go_on_with_another_kind():
    cpu = torch.device("cpu")
    held = SimpleNamespace(path="c", part=lambda _: bits_hold_within(cpu, 8, "compiled"))
    check_within(held, bits_hold_within(cpu, 8, "compiled"))
    with pytest.raises(RefusedError, match="step_kind compiled, now eager"):
        check_within(held, bits_hold_within(cpu, 8))


def test_a_restart_keeps_the_kind():
    from kway.jobs.place import Place

    place = Place(choose(["cpu"] * 3, "auto", "math", 8, "compiled"), 1, None)
    assert without(place, 1, 8).plan.step_kind == "compiled"


def test_what_a_compiler_needs_is_looked_for(tmp_path, monkeypatch):
    nowhere = {"PATH": str(tmp_path)}
    assert compilers.missing("cpu", nowhere).startswith("no C++ compiler ")
    assert compilers.missing("cpu", {**nowhere, "CXX": "my++ -O2"}) == (
        "no C++ compiler my++ is there (CXX=my++ -O2)"
    )
    for name in ("my++", "gcc"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setattr(compilers.sysconfig, "get_path", lambda _: str(tmp_path))
    assert "headers of Python" in compilers.missing("cpu", {**nowhere, "CXX": "my++ -O2"})
    (tmp_path / "Python.h").touch()
    assert compilers.missing("cpu", {**nowhere, "CXX": "my++ -O2"}) is None
    monkeypatch.setattr(compilers, "find_spec", lambda _: None)
    assert compilers.missing("cuda", nowhere) == "the package triton is not installed"
    monkeypatch.setattr(compilers, "find_spec", lambda _: object())
    assert compilers.missing("cuda", nowhere) is None


def test_compiled_code_is_kept_in_a_folder_of_the_user_s(tmp_path):
    surroundings = {"XDG_CACHE_HOME": str(tmp_path)}
    assert compilers.keep_code(surroundings) == str(tmp_path / "kway" / "compiled")
    assert (tmp_path / "kway" / "compiled").is_dir()
    own = {"XDG_CACHE_HOME": str(tmp_path), compilers.CACHE: "/own"}
    assert compilers.keep_code(own) == "/own"
    # What torch has set by itself is nobody's wish.
    torchs = {"XDG_CACHE_HOME": str(tmp_path), compilers.CACHE: "/tmp/torchinductor_me"}
    assert compilers.keep_code(torchs, "/tmp/torchinductor_me") == str(tmp_path / "kway" / "compiled")
    (tmp_path / "file").touch()
    assert compilers.keep_code({"XDG_CACHE_HOME": str(tmp_path / "file")}) is None
