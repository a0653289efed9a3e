import hashlib
import socket
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.data.served import Site, serving

from kway.data.download import Patience, _append, _Part, download
from kway.data.originals import File
from kway.errors import KwayError

CONTENT = np.random.default_rng(0).bytes(200_000)
QUICK = Patience(silence_s=5, tries=3, pause_s=0.0)


@pytest.fixture
def site():
    with serving(Site({"a.bin": CONTENT})) as found:
        yield found


def file_at(*urls, content=CONTENT):
    return File("a.bin", len(content), hashlib.sha256(content).hexdigest(), urls)


def get(site, folder, patience=QUICK, events=None, **changes):
    file = replace(file_at(f"{site.url}a.bin"), **changes)
    return download(file, folder, (lambda event: None) if events is None else events.append, patience)


def ranges(site):
    return [wanted for _, wanted, _ in site.asked]


def test_a_file_comes_whole_and_leaves_no_part(site, tmp_path):
    events = []
    assert get(site, tmp_path, events=events).read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
    assert events[-1] == {"event": "bytes", "file": "a.bin", "done": len(CONTENT), "of": len(CONTENT)}


def test_what_is_there_is_not_asked_for(site, tmp_path):
    get(site, tmp_path)
    get(site, tmp_path)
    assert len(site.asked) == 1


def test_where_the_connection_breaks_it_goes_on(site, tmp_path):
    site.breaks = [50_000, 70_000]
    assert get(site, tmp_path).read_bytes() == CONTENT
    assert site.asked == [
        ("a.bin", None, None),
        ("a.bin", "bytes=50000-", '"one"'),
        ("a.bin", "bytes=120000-", '"one"'),
    ]


def test_a_later_call_goes_on_with_the_part(site, tmp_path):
    site.breaks, site.codes = [60_000], [200, 404]
    with pytest.raises(KwayError, match="404"):
        get(site, tmp_path)
    assert (tmp_path / "a.bin.part").stat().st_size == 60_000
    assert not (tmp_path / "a.bin").exists()
    assert get(site, tmp_path).read_bytes() == CONTENT
    assert ranges(site)[-1] == "bytes=60000-"


@pytest.mark.parametrize("lengths", [True, False])
def test_a_server_that_ignores_ranges_sends_all_again(site, tmp_path, lengths):
    site.breaks, site.ranges, site.lengths = [50_000, 20_000], False, lengths
    assert get(site, tmp_path).read_bytes() == CONTENT
    assert ranges(site) == [None, "bytes=50000-", "bytes=20000-"]


def test_a_server_that_always_breaks_at_one_place_and_ignores_ranges_is_given_up(site, tmp_path):
    site.breaks, site.ranges = [50_000] * 20, False
    with pytest.raises(KwayError, match="ended after 50000 of 200000 bytes"):
        get(site, tmp_path)
    assert len(site.asked) == 1 + QUICK.tries


def test_without_a_tag_or_a_date_nothing_is_put_together(site, tmp_path):
    site.tag, site.breaks = None, [50_000]
    assert get(site, tmp_path).read_bytes() == CONTENT
    assert ranges(site) == [None, None]


@pytest.mark.parametrize("tag", [None, 'W/"weak"'])
def test_a_date_serves_where_no_strong_tag_is_there(site, tmp_path, tag):
    site.tag, site.date, site.breaks = tag, "Mon, 30 Nov 2026 00:00:00 GMT", [50_000]
    assert get(site, tmp_path).read_bytes() == CONTENT
    assert site.asked[1][1:] == ("bytes=50000-", site.date)


def test_a_file_that_was_replaced_meanwhile_is_begun_anew(site, tmp_path):
    site.files["a.bin"], site.breaks, site.codes = bytes(len(CONTENT)), [50_000], [200, 404]
    with pytest.raises(KwayError, match="404"):
        get(site, tmp_path)
    site.files["a.bin"], site.tag = CONTENT, '"two"'
    assert get(site, tmp_path).read_bytes() == CONTENT
    assert ranges(site)[-2:] == ["bytes=50000-", "bytes=50000-"]
    assert len(site.asked) == 3


def test_pieces_that_do_not_fit_together_are_downloaded_once_more(site, tmp_path):
    # The server has another file by now, and says it were the same.
    site.files["a.bin"], site.breaks, site.codes = bytes(len(CONTENT)), [50_000], [200, 404]
    with pytest.raises(KwayError):
        get(site, tmp_path)
    site.files["a.bin"] = CONTENT
    assert get(site, tmp_path).read_bytes() == CONTENT
    assert ranges(site)[-2:] == ["bytes=50000-", None]


def test_wrong_bytes_are_refused_and_not_kept(site, tmp_path):
    site.files["a.bin"] = CONTENT[:-1] + b"?"
    with pytest.raises(KwayError, match=r"content of SHA-256 .*, not "):
        get(site, tmp_path)
    assert not [*tmp_path.iterdir()]
    assert len(site.asked) == 1


@pytest.mark.parametrize("addresses", ["a", "ab"])
def test_a_wrong_file_in_two_pieces_each_time_is_told_with_its_sum(site, tmp_path, addresses):
    wrong = CONTENT[:-1] + b"?"
    site.files["a.bin"], site.files["b.bin"], site.breaks = wrong, CONTENT, [50_000, 10**6] * 2
    events: list[dict] = []
    file = file_at(*(f"{site.url}{name}.bin" for name in addresses))
    said = f"{site.url}a.bin: content of SHA-256 {hashlib.sha256(wrong).hexdigest()}, not {file.sha256}"
    if addresses == "ab":
        assert download(file, tmp_path, events.append, QUICK).read_bytes() == CONTENT
        assert f"{said}; the next address is tried" in [event.get("text") for event in events]
    else:
        with pytest.raises(KwayError) as caught:
            download(file, tmp_path, events.append, QUICK)
        assert said in str(caught.value)
    assert ranges(site)[:4] == [None, "bytes=50000-"] * 2


@pytest.mark.parametrize("right", [True, False])
def test_a_part_that_is_whole_and_wrong_is_downloaded_once_more(site, tmp_path, right):
    (tmp_path / "a.bin.part").write_bytes(bytes(len(CONTENT)))
    if right:
        assert get(site, tmp_path).read_bytes() == CONTENT
    else:
        site.files["a.bin"] = wrong = CONTENT[:-1] + b"?"
        with pytest.raises(KwayError, match=hashlib.sha256(wrong).hexdigest()):
            get(site, tmp_path)
    assert ranges(site) == [None]


def test_after_an_address_with_one_byte_more_the_next_is_asked(site, tmp_path, monkeypatch):
    # Read in single bytes, so that the part has its whole size before the one too many is seen.
    monkeypatch.setattr("kway.data.download._BLOCK", 1)
    site.files["a.bin"], site.files["b.bin"], site.lengths = b"wrong!", b"right", False
    file = file_at(f"{site.url}a.bin", f"{site.url}b.bin", content=b"right")
    assert download(file, tmp_path, lambda event: None, QUICK).read_bytes() == b"right"
    assert [name for name, *_ in site.asked] == ["a.bin", "b.bin"]


def test_another_length_is_refused_before_it_is_downloaded(site, tmp_path):
    site.files["a.bin"] = b"<html>please log in</html>"
    with pytest.raises(KwayError, match="it has 26 bytes, not 200000"):
        get(site, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_file_without_end_is_cut_off(site, tmp_path):
    site.files["a.bin"], site.lengths = CONTENT * 3, False
    with pytest.raises(KwayError, match="more than 200000 bytes"):
        get(site, tmp_path)


def test_another_piece_than_the_one_asked_for_is_not_taken(site, tmp_path):
    site.breaks, site.shift = [50_000], 10
    assert get(site, tmp_path).read_bytes() == CONTENT
    assert ranges(site) == [None, "bytes=50000-", None]


def test_a_range_that_the_server_lacks_begins_anew(site, tmp_path):
    site.breaks, site.codes = [50_000], [200, 416]
    assert get(site, tmp_path).read_bytes() == CONTENT
    assert ranges(site) == [None, "bytes=50000-", None]


def test_a_busy_server_is_asked_again_and_one_without_the_file_is_not(site, tmp_path):
    events: list[dict] = []
    site.codes = [503, 429]
    assert get(site, tmp_path, events=events).read_bytes() == CONTENT
    assert "503" in events[0]["text"]
    (tmp_path / "a.bin").unlink()
    site.codes = [403]
    with pytest.raises(KwayError, match="403"):
        get(site, tmp_path)
    assert len(site.asked) == 4


def test_a_slow_server_is_waited_for_and_a_silent_one_is_not(site, tmp_path):
    site.pause_s = 0.1
    assert get(site, tmp_path, Patience(silence_s=0.3, tries=1, pause_s=0)).read_bytes() == CONTENT
    (tmp_path / "a.bin").unlink()
    site.pause_s = 1.0
    with pytest.raises(KwayError, match=r"no answer \(timed out\)"):
        get(site, tmp_path, Patience(silence_s=0.05, tries=1, pause_s=0))


def test_the_next_address_is_tried_and_a_part_of_the_first_is_not_mixed_in(site, tmp_path):
    site.files["b.bin"], site.codes, site.breaks = CONTENT, [200, 404], [50_000]
    events: list[dict] = []
    file = file_at(f"{site.url}a.bin", f"{site.url}b.bin")
    assert download(file, tmp_path, events.append, QUICK).read_bytes() == CONTENT
    assert site.asked[-1] == ("b.bin", None, None)
    assert [e["text"] for e in events if e["event"] == "notice"] == [
        f"{site.url}a.bin: the server says 404 Not Found; the next address is tried"
    ]


def test_nobody_there_is_told_with_every_address(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/a.bin"
    with pytest.raises(KwayError, match=r"a\.bin could not be downloaded \(http.*refused; http.*refused\)"):
        download(file_at(url, url), tmp_path, lambda event: None, QUICK)


def test_a_full_disk_is_no_fault_of_the_network(site, tmp_path):
    part = _Part(tmp_path, file_at(f"{site.url}a.bin"))
    part.path = Path("/dev/full")
    with (
        urllib.request.urlopen(f"{site.url}a.bin") as response,
        pytest.raises(KwayError, match=r"/dev/full cannot be written: No space left.*make room"),
    ):
        _append(response, part, lambda event: None)
