"""Input that cannot work: exit code 2, one error that names it, nothing started, nothing written."""

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kway.cli.main import main
from kway.jobs import training
from kway.launch.local import Ranks

FILES = {
    "broken.py": "import a_module_that_is_not_there\n",
    "raises.py": "def make():\n    raise RuntimeError('no weights today')\n",
    "empty.py": "x = 1\n",
    "nets.py": """
import torch
from kway import Job
from torch.nn import Linear, Module


class Net(Module):
    pass


class Block(Module):
    pass


def data():
    pass


job = Job(Net, torch.nn.MSELoss(), torch.optim.SGD, data=[(1, 2)], batch_size=1)
""",
    "leaves.py": "raise SystemExit(0)\n",
    "leaving/__init__.py": "raise SystemExit(0)\n",
    "own.py": """
import torch


class Worded(list):
    def __init__(self, target):
        super().__init__((torch.ones(2), target) for _ in range(4))


def net():
    return torch.nn.Linear(2, 2)


def numbers():
    return torch.ones(4, 2), torch.ones(4, 2)


def dicts():
    return Worded({"a": 1})


def texts():
    return Worded("left")


class Needs(torch.nn.Module):
    def __init__(self, width):
        super().__init__()


number = 3
weights = torch.ones(3)
nothing = None
""",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the user's files, in a process that can start no ranks and sees no GPU."""
    (tmp_path / "leaving").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    data = tmp_path / "data" / "fashion-mnist"
    data.mkdir(parents=True)
    (data / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"\x00\x00\x08\x03" + bytes(12))[:-4])
    (tmp_path / "none").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "train.json").write_text("{}")
    (tmp_path / "a-file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("KWAY_DATA", raising=False)

    def start(self):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(Ranks, "_start", start)
    monkeypatch.setattr(training, "run_rank", start)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("mlp --devices cuda:0", "cuda:0"),
        ("mlp --devices cuda:0,0", "cuda:0,0"),
        ("mlp --devices cpu:0", "cpu:0"),
        ("mlp --devices many", "many"),
        ("mlp --devices cpu:2 --strategy sideways", "sideways"),
        (
            "mlp --devices cpu:2 --strategy fsdp=2",
            "unknown strategy 'fsdp': known are auto, data, single, threads; 'fsdp' is",
        ),
        ("mlp --devices cpu:2 --strategy tensor=2", "'tensor' is announced, but not there yet"),
        ("mlp --devices cpu:2 --strategy pipeline", "'pipeline' is announced, but not there yet"),
        ("mlp --devices cpu:2 --strategy data=3", "data=3"),
        ("mlp --devices cpu:2 --strategy single", "single"),
        ("mpl", "did you mean 'mlp'"),
        ("mlp --data mnist6k", "mnist6k"),
        ("mlp --data ./nothere", "text, or path/file.py:name or package.module:name"),
        (
            "mlp --loss own.py:weights",
            "--loss own.py:weights is of type Tensor: it is called with output and target",
        ),
        ("mlp --optimizer sdg", "sdg"),
        ("mlp --loss crossentropy", "crossentropy"),
        ("mlp --precision fp8", "fp8"),
        ("mlp --seed ", "--seed '': it must be a whole number"),
        ("mlp --lr ", "--lr '': it must be a number"),
        ("mlp --workers 99999", "workers=99999: at most 1,024"),
        ("mlp --exactness perfect", "perfect"),
        ("mlp --step-kind swift", "unknown step kind 'swift'"),
        ("mlp --step-kind graph --devices cpu:2", "it needs a CUDA device"),
        ("mlp --exactness bits --shards 2 --devices cpu:3", "3 devices"),
        ("mlp --exactness bits --micro-batch 4", "micro_batch=4"),
        ("resnet18 --micro-batch 4", "micro_batch=4"),
        ("broken.py:Net", "a_module_that_is_not_there"),
        ("raises.py:make", "no weights today"),
        (
            "own.py:Needs",
            "without arguments; give a function that needs no others, or functools.partial(Needs, width=",
        ),
        ("nets.py", "model 'nets.py' is a file: it has job, Block, Net; say which: nets.py:job"),
        ("nets.py:", "model 'nets.py:' is a file: it has job, Block, Net"),
        ("nets.py:Nets", "it has job, Block, Net; did you mean nets.py:Net?"),
        ("mlp --data nets.py", "--data 'nets.py' is a file: it has Block, Net, data"),
        ("mlp --optimizer adm", "sgd, or path/file.py:name or package.module:name; did you mean 'adam'?"),
        ("empty.py:Net", "no 'Net'"),
        ("missing.py:Net", "missing.py"),
        ("no.such.module:Net", "no module"),
        (".:Net", "model '.:Net': path/file.py:name or package.module:name"),
        ("..nets:Net", "model '..nets:Net': path/file.py:name or"),
        ("own.py:nothing", "model 'own.py:nothing' is None: a module class, a function or a Job"),
        ("leaves.py:Net", "importing leaves.py raised SystemExit"),
        ("leaving:Net", "importing leaving raised SystemExit"),
        ("own.py:net --data own.py:dicts", "targets that are a dict, and no --loss"),
        ("own.py:net --data own.py:texts", "targets that are a tuple, and no --loss"),
        ("mlp --loss own.py:Needs", "--loss own.py:Needs raised TypeError"),
        ("mlp --optimizer own.py:number", "--optimizer own.py:number is of type int"),
        ("mlp --optimizer own.py:number --lr 0.1", "--optimizer own.py:number is of type int"),
        ("mlp --optimizer torch.optim:LBFGS --devices cpu:2", "asks for closure"),
        ("mlp --batch-size 0", "batch_size=0"),
        ("mlp --batch-size -3", "batch_size=-3"),
        ("mlp --epochs 0", "epochs=0"),
        ("mlp --steps 0", "steps=0"),
        ("mlp --lr nan", "--lr nan"),
        ("mlp --data fashion-mnist", "fashion-mnist"),
        ("mlp --data fashion-mnist --data-dir none", "none"),
        ("mlp --data fashion-mnist --data-dir data", "train-labels"),
        ("mlp --data fashion-mnist --data-dir nowhere", "nowhere"),
        ("mlp --out taken", "train.json"),
        ("mlp --out a-file", "a-file"),
        ("mlp --out a\0b", r"out='a\x00b'"),
        ("mlp --out a-file/below", "a-file"),
        ("mlp --init nothing.safetensors", "no such file or folder; name a run's folder"),
        ("mlp --init taken", "--init taken: it holds no weights.safetensors"),
        ("mlp --clip-norm 1 --clip-value 1", "--clip-norm"),
        ("mlp --save-best mae", "mae"),
        ("mlp --validate-every never", "never"),
        ("mlp --ema 1", "ema=1.0"),
        ("mlp --ema -0.5", "ema=-0.5"),
        ("mlp --ema nan", "ema=nan"),
        ("mlp --early-stop mae", "mae"),
        ("mlp --early-stop accuracy --patience 0", "patience=0"),
        ("mlp --patience 2", "--early-stop"),
        # The whole of it, and not what comes before the first comma.
        (
            'mlp --settings {"threads":2,"overlap":true}',
            r"""'{"threads":2,"overlap":true}': it must be like""",
        ),
        ("mlp --settings micro_batch=1.5", "micro_batch=1.5: it must be a whole number of at least 1"),
    ],
)
def test_train_refuses(here, capsys, line, named):
    before = sorted(path for path in here.rglob("*") if "__pycache__" not in str(path))
    # Split at spaces only: a name may hold anything else.
    assert main(["train", *line.split(" ")]) == 2
    said = capsys.readouterr()
    assert named in said.err
    assert said.out == ""
    assert said.err.count("kway: error:") == 1
    assert sorted(path for path in here.rglob("*") if "__pycache__" not in str(path)) == before


COMMANDS = {
    "train mlp": "--data --data-dir --loss --optimizer --precision --init --devices --strategy --exactness --step-kind"
    " --validate-every --save-best --early-stop --checkpoint-every --resume-from --stall-timeout --out",
    "train nets.py:job": "--data --loss --optimizer --precision",
    "prove mlp": "--data --against --out",
    "evaluate mlp": "--weights --data-dir",
    "predict mlp": "--weights --out",
    "devices": "--out",
    "launch own.py": "--logs --devices --stall-timeout",
}


@pytest.mark.parametrize("blank", ["", " "])
@pytest.mark.parametrize(
    ("command", "flag"), [(c, f) for c, flags in COMMANDS.items() for f in flags.split()]
)
def test_a_blank_value_is_no_default(here, capsys, command, flag, blank):
    name, *target = command.split()
    before = sorted(here.rglob("*"))
    assert main([name, flag, blank, *target]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"kway: error: {flag} {blank!r}: it must not be empty")
    assert (said.err.count("\n"), said.out) == (1, "")
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("name", ["broken.py", "broken"])
def test_a_file_that_does_not_import_shows_the_user_s_frames_below_the_cause(here, capsys, name):
    assert main(["train", f"{name}:Net"]) == 2
    lines = capsys.readouterr().err.splitlines()
    what = "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"
    assert lines[0] == f"kway: error: model: importing {name} raised {what}"
    assert lines[1] == "Traceback (most recent call last):"
    assert [line.split(",")[0].strip() for line in lines if line.startswith("  File ")] == [
        f'File "{here / "broken.py"}"'
    ]
    assert lines[-1] == what


@pytest.mark.parametrize("name", ["syntax.py", "syntax"])
def test_a_file_of_bad_syntax_shows_its_line_and_no_frame(here, capsys, name):
    Path("syntax.py").write_text("def made(:\n")
    assert main(["train", f"{name}:Net"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"kway: error: model: importing {name} raised SyntaxError: ")
    assert lines[1:3] == [f'  File "{here / "syntax.py"}", line 1', "    def made(:"]


def test_a_failing_factory_shows_its_traceback_and_then_the_cause(here, capsys):
    assert main(["train", "raises.py:make"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert any("raises.py" in line for line in lines)
    assert lines[-1].startswith("kway: error: model 'make' raised ")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("train mlp --clip-norm 1 --clip-value 1", "leave one out"),
        ("train mlp --patience 2", "--early-stop validation_loss"),
        ("train mlp --resume --resume-from x --out y", "--resume-from for another"),
        ("train mlp --batch-size 8 --batch-size-per-device 8", "leave one out"),
        ("train mlp --lr-scale linear", "--batch-size-per-device)"),
        ("train mlp --batch-size-per-device 8 --lr-warmup 2", "a schedule that warms up"),
        ("train mlp --lr nan", "leave it out"),
        ("train mlp --init nothing", "weights.safetensors"),
        ("train mlp --init a-file", "name one, or the folder of a run"),
        ("train mlp --exactness bits --shards 0", "leave it out for 8"),
        ("train own.py:dicts --loss mse --data own.py:numbers", "return one"),
        ("evaluate mlp --weights nothing", "name a run's folder"),
    ],
)
def test_the_error_ends_with_what_to_do(here, capsys, line, advice):
    assert main(line.split()) == 2
    assert advice in capsys.readouterr().err.rstrip().rpartition("; ")[2]


@pytest.mark.parametrize("command", ["evaluate", "predict"])
@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "runs/frist",
            "runs/frist: no such file or folder; name a run's folder or a safetensors file; did you"
            " mean runs/first?",
        ),
        ("runs/first/weight.safetensors", "did you mean runs/first/weights.safetensors?"),
        ("runs", "runs holds no weights.safetensors; name a run's folder or a safetensors file\n"),
        ("runs/first", "runs/first/train.json says that they are of 'lenet'"),
    ],
)
def test_weights_that_are_not_there_or_of_another_model(here, capsys, command, path, said):
    folder = here / "runs" / "first"
    folder.mkdir(parents=True)
    save_file({"conv1.bias": torch.ones(2)}, folder / "weights.safetensors")
    (folder / "train.json").write_text('{"kind": "train", "model": "lenet"}')
    (here / "runs" / "frost").mkdir()
    assert main([command, "mlp", "--weights", path]) == 2
    assert said in capsys.readouterr().err
    assert len([*(here / "runs").iterdir()]) == 2


LONG = "x" * 300


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("evaluate mlp --weights {}", "--weights {}"),
        ("predict mlp --weights {}/below", "--weights {}/below"),
        ("train {}.py:Net", "model file {}.py"),
        ("train mlp --data {}.py:D", "--data file {}.py"),
        ("train mlp --data synthetic --loss {}.py:f", "file {}.py"),
        ("train mlp --data synthetic --init {}", "--init {}"),
        ("train mlp --data mnist --data-dir {}", "data set 'mnist': {}/mnist"),
        ("train mlp --data synthetic --resume-from {}", "resume='{}'"),
        ("prove mlp --data synthetic --exactness bits --against {}", "{}"),
        ("train mlp --data synthetic --out {}", "out folder {}"),
        ("launch {}", "script {}"),
    ],
)
def test_a_name_that_no_file_can_have_is_one_line(here, capsys, line, named):
    assert main(line.format(LONG).split()) == 2
    said = capsys.readouterr()
    assert said.err.startswith("kway: error: ")
    assert (said.err.count("\n"), said.out) == (1, "")
    assert named.format(LONG) in said.err
    assert "File name too long" in said.err


def test_a_folder_that_is_closed_is_one_line(here, capsys, monkeypatch):
    stat = Path.stat

    def closed(self, **options):
        # Root may look everywhere.
        if "closed" in self.parts[:-1]:
            raise PermissionError(13, "Permission denied", str(self))
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", closed)
    (here / "closed").mkdir()
    for line in (
        "evaluate mlp --weights closed",
        "train mlp --data synthetic --init closed",
        "train closed/net.py:Net",
    ):
        assert main(line.split()) == 2
        said = capsys.readouterr()
        assert said.err.count("\n") == 1
        assert "closed/" in said.err
        assert said.err.endswith("cannot be read: Permission denied\n")
    # Beside a name that is not there: it is no proposal.
    assert main(["evaluate", "mlp", "--weights", "closd"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_weights_under_a_name_that_no_file_can_have():
    import kway

    job = kway.Job(torch.nn.Linear(2, 2), torch.nn.MSELoss(), torch.optim.SGD, (torch.ones(4, 2),) * 2)
    for given in ({"weights": LONG}, {"job": replace(job, init=LONG)}):
        with pytest.raises(kway.UsageError, match=r"cannot be read: .*File name too long"):
            kway.evaluate(**{"job": job, "devices": "cpu:1", **given})
