import io
import os
import threading
import time
from pathlib import Path

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


def test_a_character_in_two_halves_comes_out_whole(shown):
    output, writers = start(1, shown)
    first, second = "ä".encode()[:1], "ä".encode()[1:]
    os.write(writers[0], b"x" + first)
    output.drain()
    os.write(writers[0], second + b"y")
    finish(output, writers)
    assert "".join(text for _, _, text in shown) == "xäy"


def test_bytes_that_are_no_text_are_shown_marked_and_kept(shown, tmp_path):
    output, writers = start(2, shown, tmp_path)
    garbage = bytes(range(256)) * 3
    os.write(writers[1], garbage)
    finish(output, writers)
    assert (tmp_path / "rank-1.log").read_bytes() == garbage
    assert {rank for rank, _, _ in shown} == {1}
    assert all(text.endswith("\n") for _, _, text in shown)


def test_a_terminal_without_all_characters_loses_no_line(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    to_parent(2)(1, "stdout", "naïve ✓\n")
    assert raw.getvalue() == b"[rank 1] na\\xefve \\u2713\n"


def test_a_full_disk_ends_the_log_with_one_warning_and_nothing_else(shown, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    output, writers = start(2, shown, tmp_path)
    for _ in range(40):
        os.write(writers[0], b"x" * 9_999 + b"\n")
    output.note(0, "a traceback")
    finish(output, writers)
    lines = [text for _, _, text in shown]
    assert lines.count("x" * 9_999 + "\n") == 40
    assert [line for line in lines if "x" not in line or "warning" in line] == [
        f"kway: warning: {tmp_path}/rank-0.log cannot be written: No space left on device; the log ends here\n"
    ]


def test_a_rank_that_never_stops_printing_does_not_keep_the_rest_waiting(shown):
    output, (one, two) = start(2, shown)
    stop = threading.Event()

    def print_on():
        while not stop.is_set():
            os.write(one, b"again\n" * 100)

    thread = threading.Thread(target=print_on)
    thread.start()
    os.write(two, b"the cause\n")
    began = time.monotonic()
    output.drain(timeout=30)
    assert (1, "stdout", "the cause\n") in shown
    assert time.monotonic() - began < 10
    stop.set()
    thread.join()
    finish(output, [one, two])


def test_ten_megabytes_of_four_ranks_at_once_stay_whole_and_in_order(shown, tmp_path):
    output, writers = start(4, shown, tmp_path)

    def fill(rank):
        with os.fdopen(os.dup(writers[rank]), "wb") as pipe:
            for number in range(2_600):
                pipe.write(f"{rank}:{number}:".encode() + b"x" * 1_000 + (b"\n" if number < 2_599 else b""))

    threads = [threading.Thread(target=fill, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    finish(output, writers)
    for rank in range(4):
        lines = [text for who, _, text in shown if who == rank]
        assert lines == [f"{rank}:{number}:" + "x" * 1_000 + "\n" for number in range(2_600)]
        assert (tmp_path / f"rank-{rank}.log").read_text() == "".join(lines).removesuffix("\n")
