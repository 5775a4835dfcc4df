"""The socketpair between keeper and coordinator: MessagePack frames, each behind its length.

A request is [number, operation, arguments], its answer [number, is an error, value]. The keeper only answers.
"""

from __future__ import annotations

import math
import select
import socket
import time
from typing import Any

import msgspec

VERSION = 4  # of the requests, and of what a coordinator is given
_LENGTH = 4
_CHUNK = 1 << 18


class Link:
    """One end. Data for which the other end has no room is sent by a later call; EOFError once it is gone."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self._out = bytearray()
        self._in = bytearray()

    def send(self, *message: Any) -> None:
        """Send a message, or as much of it as there is room for."""
        frame = msgspec.msgpack.encode(message)
        self._out += len(frame).to_bytes(_LENGTH, "little") + frame
        self.flush()

    def flush(self) -> bool:
        """Send the kept data; returns whether all of it went out."""
        try:
            while self._out:
                del self._out[: self.socket.send(memoryview(self._out)[:_CHUNK].tobytes())]
        except BlockingIOError:
            return False
        except OSError as error:
            raise EOFError(f"the other end is gone: {error}") from None
        return True

    def receive(self, timeout: float | None = 0.0) -> list[Any] | None:
        """The next message; None if none came within `timeout` seconds. Kept data goes out meanwhile."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            frame = self._take()
            if frame is not None:
                message: list[Any] = msgspec.msgpack.decode(frame)
                return message
            poll = select.poll()
            poll.register(self.socket, select.POLLIN if self.flush() else select.POLLIN | select.POLLOUT)
            left_ms = None if deadline is None else max(0, math.ceil((deadline - time.monotonic()) * 1000))
            if not poll.poll(left_ms):
                return None
            self._read()

    def _take(self) -> bytes | None:
        if len(self._in) < _LENGTH:
            return None
        end = _LENGTH + int.from_bytes(self._in[:_LENGTH], "little")
        if len(self._in) < end:
            return None
        frame = bytes(self._in[_LENGTH:end])
        del self._in[:end]
        return frame

    def _read(self) -> None:
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            raise EOFError("the other end is gone")
        self._in += data

    def close(self) -> None:
        """Close it for both sides: a thread that waits in `receive` raises EOFError."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was closed first
