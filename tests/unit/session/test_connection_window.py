"""Many requests of one call: which of them may be in flight, seen from the other side of the socket."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from ipcsync._deadline import deadline_of
from ipcsync._session.connection import Connection, Request
from ipcsync._wire import codec, messages

_WINDOW = 4
_WAIT_S = 30.0
_QUIET_MS = 50


class Side:
    """The coordinator's socket."""

    def __init__(self, path: Path) -> None:
        self.endpoint = f"ipc://{path}/c.sock"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.rcvtimeo = int(1000 * _WAIT_S)
        self._socket.bind(self.endpoint)
        self._routing = b""

    def next(self, count: int) -> list[int]:
        """The ids of the next requests."""
        ids = []
        for _ in range(count):
            self._routing, frame = self._socket.recv_multipart()
            ids.append(msgspec.msgpack.decode(frame)[1])
        return ids

    def nothing_comes(self) -> bool:
        return not self._socket.poll(_QUIET_MS)

    def answer(self, *ids: int) -> None:
        for id_ in ids:
            self._socket.send_multipart([self._routing, codec.encode_reply(id_, messages.Done())])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    side = Side(tmp_path)
    yield side
    side.close()


def test_further_requests_go_out_as_soon_as_the_oldest_is_answered_and_never_more_than_the_window(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ipcsync._session.connection._RETRY_NS", 1 << 60)  # only what is seen here counts
    connection = Connection(side.endpoint)
    connection.window = _WINDOW
    requests = [Request(messages.Stats()) for _ in range(10)]
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(connection.exchange, requests, b"t" * 16, deadline_of(_WAIT_S))
        try:
            first = side.next(_WINDOW)
            assert side.nothing_comes()
            side.answer(*first[1:])
            assert side.nothing_comes(), "the coordinator might forget the reply to the first one"
            side.answer(first[0])
            second = side.next(_WINDOW)
            side.answer(second[0])
            third = side.next(1)
            assert third == [second[-1] + 1], "the others are still unanswered"
            side.answer(*second[1:], *third)
            last = side.next(1)
            side.answer(*last)
            asked.result(_WAIT_S)
        finally:
            connection.close()
    assert [*first, *second, *third, *last] == [request.id for request in requests]
    assert connection.sent == len(requests), "none was sent twice"
    assert all(request.reply is not None for request in requests)


def test_requests_are_sent_again_once_no_reply_has_come_for_a_second_and_not_while_replies_come(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 0
    monkeypatch.setattr("ipcsync._session.connection.time", SimpleNamespace(monotonic_ns=lambda: now_ns))
    connection = Connection(side.endpoint)
    connection.window = _WINDOW
    requests = [Request(messages.Stats()) for _ in range(10)]
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(connection.exchange, requests, b"t" * 16, 3600 * 10**9)
        try:
            sent = side.next(_WINDOW)
            while len(sent) < len(requests):
                now_ns += 900_000_000
                side.answer(sent[-_WINDOW])
                sent += side.next(1)
            assert sent == [request.id for request in requests], "none was sent twice"
            assert side.nothing_comes()
            now_ns += 1_100_000_000
            assert side.next(_WINDOW) == sent[-_WINDOW:]
            side.answer(*sent[-_WINDOW:])
            asked.result(_WAIT_S)
        finally:
            now_ns = 1 << 60  # past the deadline, so that the call ends
            connection.close()
    assert all(request.reply is not None for request in requests)


def test_a_request_whose_reply_went_with_its_coordinator_is_sent_again(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, lost = zmq.Socket.recv, [True]

    def recv(socket: zmq.Socket[bytes], *flags: Any, **options: Any) -> Any:
        if socket.type == zmq.DEALER and lost:
            lost.pop()
            receive(socket, *flags, **options)
            raise zmq.Again
        return receive(socket, *flags, **options)

    monkeypatch.setattr(zmq.Socket, "recv", recv)
    monkeypatch.setattr("ipcsync._session.connection._RETRY_NS", 10_000_000)
    connection = Connection(side.endpoint)
    request = Request(messages.Stats())
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(connection.exchange, [request], b"t" * 16, deadline_of(_WAIT_S))
        try:
            for _ in range(2):
                side.answer(*side.next(1))
            asked.result(_WAIT_S)
        finally:
            connection.close()
    assert (request.reply, lost) == (messages.Done(), [])
