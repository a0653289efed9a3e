import pytest
from tests.data.served import Site, serving
from tests.data.test_fetching import offer, small_mnist

from kway.cli.main import main


@pytest.fixture
def site(monkeypatch):
    with serving(Site({})) as found:
        offer(monkeypatch, found, "mnist", small_mnist())
        yield found


def test_a_set_is_fetched_to_where_training_looks_for_it(site, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["data", "fetch", "mnist"]) == 0
    out = capsys.readouterr().out
    assert f"mnist      {tmp_path}/kway/data/mnist: 12 to train on, 4 held out" in out
    assert "train-images-idx3-ubyte.gz  " in out
    assert main(["data", "fetch", "mnist"]) == 0
    assert "was there: " in capsys.readouterr().out
    assert main(["data", "list"]) == 0
    listed = capsys.readouterr().out
    assert f"mnist          {tmp_path}/kway/data/mnist" in listed
    assert "kway data fetch cifar10, 162.2 MiB" in listed
    assert main(["train", "mlp", "--data", "mnist", "--steps", "1", "--out", str(tmp_path / "run")]) == 0
    assert "mnist: 12 to train on, 4 held out" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_a_root_of_the_users_own_is_taken(site, monkeypatch, tmp_path, capsys, how):
    root = tmp_path / "mine"
    if how == "variable":
        monkeypatch.setenv("KWAY_DATA", str(root))
    assert main(["data", "fetch", "mnist", *(["--data-dir", str(root)] if how == "flag" else [])]) == 0
    assert (root / "mnist").is_dir()


def test_a_set_that_is_there_and_not_whole_is_told(site, tmp_path, capsys):
    assert main(["data", "fetch", "mnist", "--data-dir", str(tmp_path)]) == 0
    (tmp_path / "mnist/t10k-labels-idx1-ubyte.gz").unlink()
    assert main(["data", "fetch", "mnist", "--data-dir", str(tmp_path)]) == 2
    assert f"remove {tmp_path}/mnist and fetch it again" in capsys.readouterr().err


def test_an_interrupted_download_says_that_it_goes_on(site, monkeypatch, tmp_path, capsys):
    def pressed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kway.data.fetching.download", pressed)
    assert main(["data", "fetch", "mnist", "--data-dir", str(tmp_path)]) == 130
    assert "interrupted: what was downloaded stays, and the same command goes on" in capsys.readouterr().err


def test_a_server_that_lacks_a_file_is_told_with_what_to_do(site, tmp_path, capsys):
    site.files.clear()
    assert main(["data", "fetch", "mnist", "--data-dir", str(tmp_path)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "404" in error
    assert f"into {tmp_path}/mnist (see http://yann.lecun.com/exdb/mnist/)" in error


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("data", "WHAT is missing"),
        ("data get mnist", "unknown kway data 'get': known are fetch, list"),
        ("data fetch", "kway data fetch without a name"),
        ("data list mnist", "it lists all sets"),
        ("data fetch mnist synthetic", "'synthetic' is not downloaded"),
        ("data fetch mnits", "what can be fetched: cifar10, fashion-mnist, mnist"),
    ],
)
def test_bad_input_is_told_before_anything_is_downloaded(site, words, text, capsys):
    assert main(words.split()) == 2
    assert text in capsys.readouterr().err
    assert not site.asked
