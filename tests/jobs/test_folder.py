import pytest

from kway.errors import UsageError
from kway.jobs.folder import claimed


def test_only_one_stage_is_at_work_in_a_folder(tmp_path):
    out = tmp_path / "run"
    with claimed(out, "train.json"):
        with pytest.raises(UsageError, match="another run is at work"), claimed(out, "train.json"):
            pytest.fail("two in one folder")
        # What was refused took nothing away, though the folder is still empty.
        assert out.is_dir()
        with claimed(out, "cluster.json", alone=False):
            pass
    with claimed(out, "train.json"):
        pass


def test_a_failed_stage_lets_its_folder_go(tmp_path):
    with pytest.raises(ValueError, match="mine"), claimed(tmp_path / "a" / "b", "train.json"):
        raise ValueError("mine")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("how", ["removed", "renamed", "filled"])
def test_what_happens_to_the_folder_does_not_hide_what_failed(tmp_path, how):
    out = tmp_path / "run"

    def fail():
        if how == "removed":
            out.rmdir()
        elif how == "renamed":
            out.rename(tmp_path / "moved")
        else:
            (out / "weights").touch()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), claimed(out, "train.json"):
        fail()
    assert (out / "weights").exists() == (how == "filled")


def test_names_that_no_folder_can_have(tmp_path):
    with (
        pytest.raises(UsageError, match="cannot be written: File name too long"),
        claimed(tmp_path / ("x" * 256), "train.json"),
    ):
        pytest.fail("made")
    (tmp_path / "link").symlink_to("nowhere")
    with (
        pytest.raises(UsageError, match=r"out='': an empty text names nothing; '\.' is the current"),
        claimed("", "train.json"),
    ):
        pytest.fail("made")
    with (
        pytest.raises(UsageError, match="is a link to nowhere, which is not there"),
        claimed(tmp_path / "link", "train.json"),
    ):
        pytest.fail("made")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="File exists"), claimed(tmp_path / "file", "train.json"):
        pytest.fail("made")
