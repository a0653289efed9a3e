import socket

import pytest

from kway.errors import KwayError
from kway.launch.channel import Inbox, frame


def test_messages_come_out_whole_and_in_order_however_the_bytes_arrive():
    here, there = socket.socketpair()
    with here, there:
        inbox, wire = Inbox(), frame(("event", 1)) + frame(("result", b"x" * 1000))
        heard = []
        for start in range(0, len(wire), 7):
            there.sendall(wire[start : start + 7])
            heard += inbox.receive(here)
    assert heard == [("event", 1), ("result", b"x" * 1000)]


def test_nothing_to_read_is_not_the_end():
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        inbox = Inbox()
        assert inbox.receive(here) == []
        assert not inbox.closed
        there.close()
        assert inbox.receive(here) == []
        assert inbox.closed


def test_bytes_of_somebody_else_are_an_error_that_shows_them():
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"print to the wrong descriptor")
        with pytest.raises(KwayError, match="print to the wr"):
            Inbox().receive(here)
