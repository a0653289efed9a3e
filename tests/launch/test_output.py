import os

import pytest

from kway.launch.output import Output, to_parent


@pytest.fixture
def shown():
    return []


def start(ranks, shown, logs=None, echo=None):
    output = Output(ranks, echo or (lambda rank, stream, text: shown.append((rank, stream, text))), logs)
    writers = []
    for rank in range(ranks):
        read, write = os.pipe()
        output.add(rank, "stdout", read)
        writers.append(write)
    output.start()
    return output, writers


def finish(output, writers):
    for writer in writers:
        os.close(writer)
    output.close()


def test_lines_are_whole_however_they_are_written(shown):
    output, (one, two) = start(2, shown)
    os.write(one, b"half a ")
    os.write(two, b"other\n")
    output.drain()
    assert shown == [(1, "stdout", "other\n")]
    os.write(one, b"line\nrest")
    finish(output, [one, two])
    assert shown[1:] == [(0, "stdout", "half a line\n"), (0, "stdout", "rest\n")]


def test_of_a_progress_bar_the_last_state_is_shown(shown):
    output, writers = start(2, shown)
    os.write(writers[0], b"\r 10%\r 50%\r100%\nwindows line\r\n")
    finish(output, writers)
    assert [text for _, _, text in shown] == ["100%\n", "windows line\n"]


def test_a_single_rank_writes_as_if_to_the_terminal(shown):
    output, writers = start(1, shown)
    os.write(writers[0], b"\r 10%")
    output.drain()
    assert shown == [(0, "stdout", "\r 10%")]
    finish(output, writers)


def test_endless_output_without_a_newline_is_cut_and_kept(shown, tmp_path):
    output, writers = start(2, shown, tmp_path)
    for _ in range(80):
        os.write(writers[0], b"x" * 50_000)
    finish(output, writers)
    assert sum(text.count("x") for _, _, text in shown) == 4_000_000
    assert len(shown) > 1
    assert (tmp_path / "rank-0.log").read_bytes() == b"x" * 4_000_000
    assert (tmp_path / "rank-1.log").read_bytes() == b""


def test_bytes_that_are_no_text_do_not_stop_the_reading(shown, tmp_path):
    output, writers = start(2, shown, tmp_path)
    os.write(writers[0], b"\xff\xfe\nnext\n")
    finish(output, writers)
    assert shown[1][2] == "next\n"
    assert (tmp_path / "rank-0.log").read_bytes() == b"\xff\xfe\nnext\n"


def test_notes_go_to_the_log_of_their_rank_only(shown, tmp_path):
    output, writers = start(2, shown, tmp_path)
    output.note(1, "what went wrong\n")
    finish(output, writers)
    assert (tmp_path / "rank-1.log").read_text() == "what went wrong\n"
    assert shown == []


def test_lines_are_marked_with_their_rank_only_where_there_are_several(capsys):
    to_parent(2)(1, "stdout", "a\n")
    to_parent(1)(0, "stderr", "b\n")
    assert capsys.readouterr() == ("[rank 1] a\n", "b\n")


def test_an_echo_that_fails_is_reported_and_reading_goes_on(tmp_path):
    def fails(rank, stream, text):
        raise ValueError("no terminal")

    output, writers = start(2, [], tmp_path, echo=fails)
    os.write(writers[0], b"one\n")
    with pytest.raises(ValueError, match="no terminal"):
        output.drain()
    os.write(writers[0], b"two\n")
    finish(output, writers)
    assert (tmp_path / "rank-0.log").read_text() == "one\ntwo\n"
