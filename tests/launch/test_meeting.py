"""Ranks that meet, as threads of one process: the store is the same."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from kway.errors import KwayError, UsageError
from kway.launch import meeting
from kway.launch.address import addresses_of_interfaces, reserved_port
from kway.launch.init_method import SIGN, InitMethod
from kway.launch.joining import join
from kway.launch.meeting import meet
from kway.world import World

LONG = timedelta(seconds=30)
SHORT = timedelta(seconds=1)


def together(method, worlds, timeout=LONG):
    """Return what each rank got, or the error that it raised."""

    def one(world):
        try:
            return meet(method, world, timeout)
        except KwayError as error:
            return error

    with ThreadPoolExecutor(len(worlds)) as pool:
        return list(pool.map(one, worlds))


def of(size):
    return [World(rank, size, rank, size) for rank in range(size)]


def exchanged(found):
    for rank, met in enumerate(found):
        met.store.set(f"from {rank}", str(rank))
    return [[met.store.get(f"from {rank}") for rank in range(len(found))] for met in found]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_ranks_meet_at_an_address(host):
    try:
        with reserved_port(host) as port:
            method = InitMethod(host, port)
    except UsageError:
        pytest.skip(f"this machine has no {host}")
    found = together(method, of(3))
    assert exchanged(found) == [[b"0", b"1", b"2"]] * 3
    assert all(met.one_machine for met in found)


@pytest.mark.parametrize("own", [False, True])
def test_ranks_meet_by_a_file_which_goes(tmp_path, own):
    method = InitMethod(path=tmp_path / "meeting", own=own)
    for _ in range(2):
        found = together(method, of(3))
        assert exchanged(found) == [[b"0", b"1", b"2"]] * 3
        assert list(tmp_path.iterdir()) == []


def test_what_an_earlier_job_left_is_no_trap(tmp_path):
    """A port where nobody is, one where somebody else is, and the store of another job."""
    other, _ = meeting._served(InitMethod(path=tmp_path / "other"), LONG)
    said = json.loads((tmp_path / "other").read_text())
    method = InitMethod(path=tmp_path / "meeting")
    with reserved_port() as nobody:
        for left in (said | {"port": nobody}, said | {"word": "of a job long gone"}, {"word": "half"}):
            method.path.write_text(SIGN.decode() + ", " + json.dumps(left)[1:])
            with ThreadPoolExecutor(1) as pool:
                early = pool.submit(meet, method, of(2)[1], LONG)
                time.sleep(0.2)
                assert not early.done()
                late = meet(method, of(2)[0], LONG)
                assert exchanged([late, early.result()]) == [[b"0", b"1"]] * 2
    assert not other.check(["from 0"])


def test_what_somebody_else_wrote_in_the_place_of_kway_s_own_file_is_not_read(tmp_path, monkeypatch):
    method = InitMethod(path=tmp_path / "meeting", own=True)
    meeting._served(method, LONG)
    assert meeting._read(method)["hosts"] == ["127.0.0.1"]
    mine = meeting.os.geteuid()
    monkeypatch.setattr(meeting.os, "geteuid", lambda: mine + 1)
    assert meeting._read(method) is None


def test_rank_0_leaves_the_file_that_another_job_wrote_over_its_own(tmp_path):
    method = InitMethod(path=tmp_path / "meeting")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, method, of(2)[0], timedelta(seconds=2))
        while (said := meeting._read(method)) is None:
            time.sleep(0.01)
        second = pool.submit(meet, method, of(2)[0], LONG)
        while meeting._read(method) == said:
            time.sleep(0.01)
        with pytest.raises(KwayError, match="1 rank did not come: 1"):
            first.result()
        # Without the file, this rank would wait for nobody.
        late = meet(method, of(2)[1], timedelta(seconds=5))
        assert exchanged([second.result(), late]) == [[b"0", b"1"]] * 2
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_do_not_come_are_named(tmp_path):
    method = InitMethod(path=tmp_path / "meeting")
    (first,) = together(method, of(3)[:1], SHORT)
    assert str(first).startswith(
        f"rank 0 of 3 waited in vain at file://{tmp_path}/meeting: 2 ranks did not come: 1, 2"
    )
    assert list(tmp_path.iterdir()) == []
    (second,) = together(method, of(3)[1:2], SHORT)
    assert str(second).startswith("rank 1 of 3 found no meeting point at file:")
    assert "rank 0 has not written there; check that rank 0 runs" in str(second)


def test_two_processes_of_one_rank_and_ranks_of_two_jobs_are_errors(tmp_path):
    method = InitMethod(path=tmp_path / "meeting")
    errors = []
    # A process that comes when the others have met and gone is none of two: it finds nobody.
    for _ in range(4):
        found = together(method, [*of(3), of(3)[1]], timedelta(seconds=4))
        errors += [str(each) for each in found if isinstance(each, UsageError)]
        if errors:
            break
    assert len(errors) == 1
    assert errors[0].startswith("two processes say that they are rank 1 of 3 at file:")
    found = together(method, [of(2)[0], of(3)[1]], timedelta(seconds=15))
    assert "rank 0 says that there are 2 ranks, rank 1 that there are 3" in [error.got for error in found]


def test_a_port_that_is_taken_is_an_error_of_the_input():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        method = InitMethod("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(
            UsageError, match=rf"port {method.port} cannot be had for {method}: address already"
        ):
            meet(method, of(2)[0], SHORT)


def test_other_machines_are_told_every_address_of_this_one(monkeypatch):
    assert "127.0.0.1" in addresses_of_interfaces()
    monkeypatch.setattr(meeting, "addresses_of_interfaces", lambda: ["127.0.0.1", "10.77.0.1"])
    monkeypatch.setattr(socket, "gethostname", lambda: "node-0.invalid")
    hosts = meeting._own_addresses(InitMethod())
    assert {"10.77.0.1", "node-0.invalid"} <= {*hosts}
    assert not [host for host in hosts if host.startswith("127.")]


def test_the_first_address_that_answers_is_taken_from_another_machine(tmp_path, monkeypatch):
    method = InitMethod(path=tmp_path / "meeting")
    served, _ = meeting._served(method, LONG)
    said = json.loads(method.path.read_text())
    monkeypatch.setattr(meeting, "machine", lambda: "another")
    monkeypatch.setattr(meeting, "_TRY_S", 0.2)
    found = meeting._known(said | {"hosts": ["127.0.0.2", "127.0.0.1"]}, LONG)
    assert found.get("word") == served.get("word") == said["word"].encode()


def test_a_host_where_something_else_listens_does_not_bar_the_next(tmp_path, monkeypatch):
    method = InitMethod(path=tmp_path / "meeting")
    served, _ = meeting._served(method, LONG)
    said = json.loads(method.path.read_text())
    monkeypatch.setattr(meeting, "machine", lambda: "another")
    monkeypatch.setattr(meeting, "_TRY_S", 0.3)
    real, asked = meeting._store, []

    def store(host, port, timeout):
        asked.append(host)
        if host == "127.0.0.2":  # what torch's client raises where a listener closes at once
            raise RuntimeError("Connection reset by peer")
        return real(host, port, timeout)

    monkeypatch.setattr(meeting, "_store", store)
    monkeypatch.setattr(meeting, "wait_for_listener", lambda host, port, timeout: None)
    found = meeting._known(said | {"hosts": ["127.0.0.2", "127.0.0.1"]}, LONG)
    assert found.get("word") == served.get("word")
    assert asked == ["127.0.0.2", "127.0.0.1"]
    with pytest.raises(RuntimeError, match="reset"):
        meeting._known(said | {"hosts": ["127.0.0.2"]}, LONG)


@pytest.fixture
def silent():
    """The port of a service that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("way", ["address", "file", "environment"])
def test_a_listener_that_says_nothing_is_one_clear_error(way, silent, tmp_path, monkeypatch):
    monkeypatch.setattr(meeting, "_SLACK_S", 0.1)
    monkeypatch.setattr(meeting, "_TRY_S", 0.3)
    if way == "environment":
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(silent))

        def look():
            join(of(2)[1], SHORT)
    else:
        method = InitMethod("127.0.0.1", silent)
        if way == "file":
            method = InitMethod(path=tmp_path / "meeting")
            left = {"port": silent, "word": "of another", "machine": meeting.machine(), "hosts": []}
            method.path.write_text(SIGN.decode() + ", " + json.dumps(left)[1:])

        def look():
            meet(method, of(2)[1], SHORT)

    began = time.monotonic()
    with pytest.raises(KwayError) as caught:
        look()
    assert time.monotonic() - began < 6
    assert caught.value.got.startswith("rank 1 of 2 found no meeting point at ")
    assert f"what listens at 127.0.0.1:{silent} does not answer as rank 0 does" in caught.value.need
    assert caught.value.do.startswith("check ")
