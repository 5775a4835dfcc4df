"""Which connections are cut, and that only those are: not another process's, not what took a descriptor's number."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ipcsync_coordinator.gate import UNREAD_BYTES, Sender, StrikeCounter, Unread, disconnect
from ipcsync_keeper.config import Settings


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(0.1)
        yield ours, theirs


def _descriptors_of(fd: int) -> int:
    """How many descriptors of this process are of the same file as `fd`, itself included."""
    wanted, found = os.fstat(fd), 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile: other tests' sockets go when they are garbage
            found += os.path.samestat(os.fstat(int(name)), wanted)
    return found


def test_a_connection_of_that_process_is_shut_down(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    assert disconnect(ours.fileno(), os.getpid())
    assert theirs.recv(1) == b""
    assert _descriptors_of(ours.fileno()) == 1


def test_a_connection_of_another_process_is_left_alone(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    assert not disconnect(ours.fileno(), os.getpid() + 1)
    with pytest.raises(TimeoutError):
        theirs.recv(1)


def test_what_is_no_connection_is_left_alone() -> None:
    reading, writing = os.pipe()
    assert not disconnect(reading, os.getpid())
    assert os.write(writing, b"x") == 1
    assert _descriptors_of(reading) == 2, "a pipe's two ends are one file"
    os.close(reading)
    os.close(writing)
    assert not disconnect(reading, os.getpid())  # closed meanwhile


def _strike(strikes: StrikeCounter, *routings: bytes) -> list[bool]:
    """Whether a connection was due after each message."""
    due = []
    for routing in routings:
        strikes.strike(routing)
        due.append(strikes.take_due())
    return due


def test_a_connection_is_due_with_each_so_many_in_a_row() -> None:
    strikes = StrikeCounter(most=3, remembered=10)
    assert _strike(strikes, *[b"a"] * 7) == [False, False, True, False, False, True, False]
    assert _strike(strikes, b"b", b"b", b"c", b"b") == [False, False, False, True]
    assert not strikes.take_due()


def test_nobody_is_cut_whose_process_is_not_known(pair: tuple[socket.socket, socket.socket]) -> None:
    assert not disconnect(pair[0].fileno(), 0)


def test_a_session_that_speaks_is_no_stranger() -> None:
    strikes = StrikeCounter(most=2, remembered=10)
    for _ in range(5):
        assert _strike(strikes, b"a") == [False]
        strikes.clear(b"a")


def test_no_more_strangers_are_remembered_than_was_said() -> None:
    strikes = StrikeCounter(most=3, remembered=2)
    assert not any(_strike(strikes, b"a", b"b", b"b", b"a", b"c"))  # b spoke longest ago
    assert _strike(strikes, b"a", b"b") == [True, False]


def test_no_number_of_connections_is_too_many_to_be_counted() -> None:
    """As many as there may be sessions: with another one, each would be forgotten before its next message."""
    connections = [b"%d" % number for number in range(2 * Settings().max_sessions)]
    strikes = StrikeCounter(most=2)
    assert not any(_strike(strikes, *connections))
    assert all(_strike(strikes, *connections))
    reading, writing = socket.socketpair()
    with reading, writing:
        writing.send(b"not read")
        frame = SimpleNamespace(get=lambda _: writing.fileno())
        unread = Unread()
        senders = [Sender(routing, frame) for routing in connections]
        assert all(unread.admits(sender, UNREAD_BYTES) for sender in senders)
        assert not any(unread.admits(sender, UNREAD_BYTES) for sender in senders)
