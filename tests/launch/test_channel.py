import gc
import os
import socket

import pytest

from kway.errors import KwayError
from kway.launch.channel import Inbox, frame
from kway.launch.lifeline import Lifeline


def test_messages_come_out_whole_and_in_order_however_the_bytes_arrive():
    here, there = socket.socketpair()
    with here, there:
        inbox, wire = Inbox("rank 0"), frame(("event", 1)) + frame(("result", b"x" * 1000))
        heard = []
        for start in range(0, len(wire), 7):
            there.sendall(wire[start : start + 7])
            heard += inbox.receive(here)
    assert heard == [("event", 1), ("result", b"x" * 1000)]


def test_nothing_to_read_is_not_the_end():
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        inbox = Inbox("rank 0")
        assert inbox.receive(here) == []
        assert not inbox.closed
        there.close()
        assert inbox.receive(here) == []
        assert inbox.closed


def test_bytes_of_somebody_else_are_an_error_that_shows_them():
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"print to the wrong descriptor")
        with pytest.raises(KwayError, match="channel of rank 2 carries b'print to the wr"):
            Inbox("rank 2").receive(here)


def test_the_rank_is_named_that_writes_where_only_kway_may(ranks):
    def write(context):
        if context.world.rank == 1:
            (line,) = (found for found in gc.get_objects() if type(found) is Lifeline)
            os.write(line._sock.fileno(), b"print to the wrong descriptor")

    with pytest.raises(KwayError, match="the control channel of rank 1 carries b'print to"):
        ranks.run(write)
