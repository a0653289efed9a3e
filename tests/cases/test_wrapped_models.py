"""K01: runs of bare and wrapped models take up each other's files, and prefixes of wrappers keep nobody out."""

from dataclasses import replace
from functools import cache, partial
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import kway
from kway.checkpoints.reading import newest


class Scale(nn.Module):
    """Keeps a buffer that is in no file of weights, one that its first pass makes, and state beside tensors."""

    def __init__(self, tag):
        super().__init__()
        self.weight, self.tag = nn.Parameter(torch.ones(4)), tag
        self.register_buffer("passed", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.passed += 1
            if not hasattr(self, "made"):
                self.register_buffer("made", self.weight.detach() / 2)
        return x * self.weight + self.made * (self.passed if self.training else 1)

    def get_extra_state(self):
        return {"tag": self.tag}

    def set_extra_state(self, state):
        self.tag = state["tag"]


class Net(nn.Module):
    """Has parts that are called like the attributes of wrappers."""

    def __init__(self, tag=0):
        super().__init__()
        self.module, self._orig_mod, self.scale = nn.Linear(5, 4), nn.BatchNorm1d(4), Scale(tag)
        self.out = nn.Linear(4, 3)
        self.out.bias.requires_grad_(False)

    def forward(self, x):
        return self.out(self.scale(self._orig_mod(self.module(x))))


def checkpointed(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(model)


def compiled(model):
    return torch.compile(model, backend="eager")


def inside(wrap, model, names=("module", "scale", "out")):
    for name in names:
        setattr(model, name, wrap(getattr(model, name)))
    return model


WRAPS = {
    "bare": lambda model: model,
    "compiled": compiled,
    "compiled inside": partial(inside, compiled),
    "checkpoint inside": partial(inside, checkpointed),
    "both": lambda model: compiled(inside(checkpointed, model, names=("module", "out"))),
}
OWN = {
    *("module.weight", "module.bias", "out.weight", "out.bias", "scale.weight", "scale.made"),
    *(f"_orig_mod.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")),
}
TRAINED = {"module.weight", "module.bias", "out.weight", "scale.weight", "_orig_mod.weight", "_orig_mod.bias"}
DRAW = torch.Generator().manual_seed(1)
X, Y = torch.randn(20, 5, generator=DRAW), torch.randn(20, 3, generator=DRAW)


def wrapped(wrap, tag=0):
    return {**WRAPS, **AROUND}[wrap](Net(tag))


def job_of(wrap, tag=0, **more):
    given = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "batch_size": 5, "ema": 0.5, **more}
    return kway.Job(partial(wrapped, wrap, tag), loss=nn.MSELoss(), data=(X, Y), **given)


def train(job, devices="cpu:1", **options):
    return kway.train(job, devices=devices, strategy="data", echo=False, **options)


@cache
def whole():
    """The run that was never stopped, of the bare model."""
    return train(job_of("bare", tag=7), steps=3)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Return ``begun(wrap)``: the folder of a run that was stopped after its second step, and its result."""

    @cache
    def run(wrap):
        out = tmp_path_factory.mktemp("begun") / "run"
        best = wrap == "compiled inside"
        judged = {"validation": (X, Y)} if best else {}
        saves = {"checkpoint_every": "2steps", "save_best": "validation_loss" if best else None}
        return out, train(job_of(wrap, tag=7, **judged), steps=2, out=out, **saves)

    return run


def tag_of(model):
    return next(each.tag for each in model.modules() if isinstance(each, Scale))


# Each with the bare model, and with one other.
WRAPPED = [wrap for wrap in WRAPS if wrap != "bare"]
PAIRS = [
    *(("bare", wrap) for wrap in WRAPS),
    *((wrap, "bare") for wrap in WRAPPED),
    *zip(WRAPPED, [*WRAPPED[1:], WRAPPED[0]], strict=True),
]


@pytest.mark.parametrize(("save", "load"), PAIRS)
def test_k01_each_goes_on_with_each_others_run_bit_for_bit(begun, save, load):
    out, _ = begun(save)
    run = train(job_of(load), steps=3, resume=out)
    assert run.record.weights_sha256 == whole().record.weights_sha256
    assert run.record.ema_sha256 == whole().record.ema_sha256
    assert all(torch.equal(value, whole().ema[name]) for name, value in run.ema.items())
    assert tag_of(run.model) == 7


def test_k01_a_wrapper_is_no_part_of_what_differs_from_another_job(begun):
    other = job_of("bare", batch_size=10, optimizer=partial(torch.optim.SGD, lr=0.2, momentum=0.9))
    with pytest.raises(kway.UsageError, match=r"job: batch_size 5, now 10; optimizer: lr 0\.1, now 0\.2:"):
        train(other, steps=3, resume=begun("compiled")[0])


@pytest.mark.parametrize("save", WRAPS)
def test_k01_files_have_the_models_own_names(begun, save):
    out, run = begun(save)
    files = list(out.glob("*.safetensors"))
    assert len(files) == 2 + (save == "compiled inside")
    assert all(load_file(path).keys() == OWN for path in files)
    saved = newest(out / "checkpoints", print)
    assert (saved.weights().keys(), saved.part("ema").keys()) == (OWN, {*TRAINED, "out.bias"})
    assert saved.part("optimizer")["entries"].keys() == TRAINED
    bare = newest(begun("bare")[0] / "checkpoints", print)
    assert [saved.part(part) for part in ("options", "beginning")] == [
        bare.part(part) for part in ("options", "beginning")
    ]
    assert saved.part("buffers").keys() == {"scale.passed"}
    assert saved.part("modules") == {"scale._extra_state": {"tag": 7}}
    assert run.ema.keys() == OWN
    # The model itself stays what the user has made.
    assert str(run.model) == str(wrapped(save))


@pytest.mark.parametrize(
    ("save", "load"), [("compiled", "bare"), ("bare", "both"), ("both", "compiled inside")]
)
def test_k01_weights_to_start_from_and_to_judge(begun, save, load):
    out, run = begun(save)
    own = load_file(out / "weights.safetensors")
    right = kway.predict(job_of(save), run.model, devices="cpu:1")
    assert torch.equal(kway.predict(job_of(load), out, devices="cpu:1"), right)
    started = train(job_of(load, init=out, optimizer=partial(torch.optim.SGD, lr=0.0)), steps=1)
    assert all(torch.equal(own[name], value) for name, value in started.ema.items() if name in TRAINED)


def plain(model):
    sgd = partial(torch.optim.SGD, lr=0.1)
    return kway.Job(model, loss=nn.MSELoss(), optimizer=sgd, data=(X, Y), batch_size=20)


def net():
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


class Holds(nn.Module):
    """A model whose only part is called ``module``, and has another of its own that is called so, too."""

    def __init__(self):
        super().__init__()
        self.module = nn.Sequential()
        self.module.module = nn.Linear(5, 3)

    def forward(self, x):
        return self.module(x)


AROUND = {
    "DataParallel": nn.DataParallel,
    "compiled": compiled,
    "compiled DataParallel": lambda model: compiled(nn.DataParallel(model)),
    "compiled layer": lambda model: inside(
        compiled, model, names=[next(n for n, _ in model.named_children())]
    ),
}


@pytest.mark.parametrize(("around", "make"), [*product(AROUND, (net, Holds))])
def test_k01_the_users_own_files_with_prefixes_of_wrappers_are_taken(around, make, tmp_path):
    model = make()
    with torch.no_grad():
        right = model(X)
    state = AROUND[around](model).state_dict()
    assert any(part in name for name in state for part in ("_orig_mod.", "module."))
    save_file(state, tmp_path / "mine.safetensors")
    job = plain(make)
    started = replace(job, init=tmp_path / "mine.safetensors")
    for given, weights in ((job, state), (job, tmp_path / "mine.safetensors"), (started, None)):
        assert torch.equal(kway.predict(given, weights, devices="cpu:1"), right)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s: {f"module.{n}": v for n, v in s.items() if n != "0.bias"},
            r"missing 0\.bias; not in the model none",
        ),
        (
            lambda s: {f"module.{n}": v for n, v in {**s, "n": s["0.bias"]}.items()},
            "missing none; not in the model n",
        ),
        (
            lambda s: {n if n[0] == "0" else f"module.{n}": v for n, v in s.items()},
            r"not in the model module\.1\.bias",
        ),
    ],
)
def test_k01_what_prefixes_do_not_explain_is_told_with_the_prefix(change, said):
    prefix = r" \(also without the prefix 'module\.' of DataParallel and DistributedDataParallel\)"
    with pytest.raises(kway.UsageError, match=said + ".*" + prefix):
        kway.predict(plain(net), change(net().state_dict()), devices="cpu:1")


def test_k01_on_two_ranks_too(ranks, tmp_path):
    def run(wrap, **options):
        return train(job_of(wrap), "cpu:2", ranks=ranks, **options).record

    whole = run("bare", steps=3)
    run("compiled layer", steps=2, out=tmp_path / "run", checkpoint_every="2steps")
    again = run("bare", steps=3, resume=tmp_path / "run")
    assert (again.weights_sha256, again.ema_sha256) == (whole.weights_sha256, whole.ema_sha256)


def test_k01_a_loop_of_ones_own_too(tmp_path):
    def halves(wrap, folder, until):
        with kway.parallel(job_of(wrap, tag=7), devices="cpu:1") as session:
            begun = session.resume(folder)
            for batch in session.batches(0, begun.step):
                session.step(batch)
                if session.steps == until:
                    break
            session.checkpoint(folder, 0, until)
            session.save(folder / f"{until}")
        return load_file(folder / f"{until}" / "weights.safetensors")

    assert halves("compiled", tmp_path, 2).keys() == OWN
    found = halves("bare", tmp_path, 3)
    right = halves("bare", tmp_path / "whole", 3)
    assert all(torch.equal(value, right[name]) for name, value in found.items())


def test_k01_a_proof_starts_each_step_of_a_wrapped_model_from_its_own_state(ranks):
    proof = kway.prove(job_of("checkpoint inside"), devices="1,2", ranks=ranks, echo=False)
    assert proof.verdict == "pass"
