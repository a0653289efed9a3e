"""Whole messages over a stream socket: a marker, a length, a pickle.

Both ends are processes of the same user that share the socket by inheritance, so the pickles are trusted.
"""

import pickle
import socket
import struct
from typing import Any

from kway.errors import KwayError

_HEAD = struct.Struct("!4sQ")
_MARK = b"kway"
_CHUNK = 1 << 20


def frame(message: Any) -> bytes:
    """Return the bytes of one message on the wire."""
    body = pickle.dumps(message, protocol=5)
    return _HEAD.pack(_MARK, len(body)) + body


class Inbox:
    """Cuts the bytes that arrive at a socket into messages. ``closed`` turns true at the other end's close.

    ``whose``: the rank that the channel is of, in words, for errors.
    """

    def __init__(self, whose: str) -> None:
        self._whose = whose
        self._bytes = bytearray()
        self.closed = False

    def receive(self, sock: socket.socket) -> list[Any]:
        """Read once and return the messages that are complete by now, oldest first.

        Blocks only where the socket does. Raises ``KwayError`` for bytes that are no message: something else
        wrote to this descriptor.
        """
        try:
            chunk = sock.recv(_CHUNK)
        except BlockingIOError:
            return []
        except ConnectionError:
            chunk = b""
        if not chunk:
            self.closed = True
            return []
        self._bytes += chunk
        return self._cut()

    def _cut(self) -> list[Any]:
        messages = []
        while len(self._bytes) >= _HEAD.size:
            mark, length = _HEAD.unpack_from(self._bytes)
            if mark != _MARK:
                raise KwayError(
                    f"the control channel of {self._whose} carries {bytes(self._bytes[:16])!r}",
                    "only kway may write to it",
                    "look for code that writes to a file descriptor which it did not open",
                )
            end = _HEAD.size + length
            if len(self._bytes) < end:
                break
            messages.append(pickle.loads(self._bytes[_HEAD.size : end]))
            del self._bytes[:end]
        return messages
