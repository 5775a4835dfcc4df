"""The gate: it lets connections in while descriptors are free, and cuts those, and only those, that it should."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from ipcsync._board.runtime_dir import Place
from ipcsync_coordinator import gate
from ipcsync_coordinator.gate import UNREAD_BYTES, Sender, StrikeCounter, Unread, disconnect
from ipcsync_keeper.config import Settings
from ipcsync_keeper.resources import listen
from tests.kit.descriptors import descriptors
from tests.kit.until import until

_CROWD = 100


class _Place:
    """A place whose sockets cannot be hidden, so that connections go on to arrive at a shut gate."""

    def shut(self) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def reopen(self) -> None: ...


@contextmanager
def _gate(path: Path, told: list[str], place: Any = _Place()) -> Iterator[gate.Gate]:  # noqa: B008
    """A gate before one socket at a path."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        held = gate.Gate(place, told.append)
        held.bind(router, listen(str(path)).detach(), f"ipc://{path}")
        held.start()
        try:
            yield held
        finally:
            held.stop()


def _crowd(stack: ExitStack) -> list[socket.socket]:
    return [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(_CROWD)]


def _accepted(path: Path) -> int:
    """How many connections to `path` were accepted: others have state 02, the listening socket 01 (proc(5))."""
    rows = Path("/proc/self/net/unix").read_text().splitlines()
    return sum(row.split()[5] == "03" for row in rows if row.endswith(f" {path}"))


def _connect(crowd: list[socket.socket], path: Path) -> None:
    for one in crowd:
        one.connect(str(path))


def test_one_connection_is_accepted_and_no_other_however_late_the_gate_looks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looks, late = threading.Event(), threading.Event()

    def usable() -> int:
        looks.set()
        if threading.current_thread().name == "ipcsync-gate":
            assert late.wait(60)
        return 1 << 20

    with ExitStack() as stack:
        crowd = _crowd(stack)
        stack.enter_context(_gate(tmp_path / "s", []))
        stack.callback(late.set)
        monkeypatch.setattr(gate, "_usable", usable)
        _connect(crowd, tmp_path / "s")  # the first of them has the gate look, and stand still
        assert looks.wait(60)
        assert _accepted(tmp_path / "s") == 1
        late.set()
        until(lambda: _accepted(tmp_path / "s") == _CROWD, "all were accepted")


def test_a_shut_gate_accepts_nothing_and_counts_now_and_then(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[str] = []
    with ExitStack() as stack:
        crowd = _crowd(stack)
        stack.enter_context(_gate(tmp_path / "s", told))
        of_crowd = {one.fileno() for one in crowd}
        others = {each for each in descriptors().items() if each[0] not in of_crowd}
        before = gate.count()  # only now: what was garbage is gone

        def gone() -> int:
            """How many of earlier tests' descriptors went: they make no room, but perhaps for one between two looks."""
            return len(others - descriptors().items())

        monkeypatch.setattr(gate, "_usable", lambda: before + 20 - gone())
        _connect(crowd, tmp_path / "s")
        until(lambda: told == ["descriptors"], "it is shut")
        assert _accepted(tmp_path / "s") <= 21 + gone()  # with the one that was allowed before it looked
        for one in crowd[:10]:
            one.close()
        until(lambda: told.count("descriptors") == 2, "it was opened, and shut again")
        assert _accepted(tmp_path / "s") <= 31 + gone()  # for each descriptor that was closed here


class _ReadOnlyAtFirst(Place):
    left = 2

    def reopen(self) -> None:
        self.left -= 1
        if self.left >= 0:
            raise OSError(errno.EROFS, "Read-only file system")
        super().reopen()


def test_a_socket_that_does_not_get_its_name_back_at_the_start_gets_it_later(tmp_path: Path) -> None:
    with ExitStack() as stack:
        (one, *_) = _crowd(stack)
        lock = os.open(tmp_path, os.O_DIRECTORY)
        stack.callback(os.close, lock)
        place = _ReadOnlyAtFirst(str(tmp_path), lock, os.getpid())
        path = Path(place.sockets[0])
        stack.enter_context(_gate(path, [], place))
        until(path.exists, "clients find it")
        one.connect(str(path))
        until(lambda: _accepted(path) == 1, "it was accepted")


def test_a_socket_that_does_not_get_its_name_back_when_it_is_bound_anew_gets_it_later(tmp_path: Path) -> None:
    with ExitStack() as stack:
        lock = os.open(tmp_path, os.O_DIRECTORY)
        stack.callback(os.close, lock)
        place = _ReadOnlyAtFirst(str(tmp_path), lock, os.getpid())
        path = Path(place.sockets[0])
        held = stack.enter_context(_gate(path, [], place))
        until(path.exists, "clients find it")
        until(lambda: place.left < 0 and not held._is_shut, "the gate's thread waits for what comes")
        (router,) = held._monitors
        path.unlink()
        place.left = 1
        held.bind(router, listen(str(path)).detach(), f"ipc://{path}")
        assert not path.exists()
        until(path.exists, "clients find it again")


def test_where_no_epoll_set_can_be_seen_it_says_so_and_accepts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gate, "_entries", lambda _descriptor: [])
    with ExitStack() as stack:
        crowd = _crowd(stack)
        stack.enter_context(_gate(tmp_path / "s", []))
        _connect(crowd, tmp_path / "s")
        until(lambda: _accepted(tmp_path / "s") == _CROWD, "all were accepted")
    assert "without a look at the file descriptors" in caplog.text


# --- which connections are cut: not another process's, not what took a descriptor's number ----------------------------


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(0.1)
        yield ours, theirs


def _descriptors_of(fd: int) -> int:
    """How many descriptors of this process are of the same file as `fd`, itself included."""
    found = descriptors()
    return list(found.values()).count(found[fd])


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
    strikes = StrikeCounter(most=3)
    assert _strike(strikes, *[b"a"] * 7) == [False, False, True, False, False, True, False]
    assert _strike(strikes, b"b", b"b", b"c", b"b") == [False, False, False, True]
    assert not strikes.take_due()


def test_nobody_is_cut_whose_process_is_not_known(pair: tuple[socket.socket, socket.socket]) -> None:
    assert not disconnect(pair[0].fileno(), 0)


def test_a_session_that_speaks_is_no_stranger() -> None:
    strikes = StrikeCounter(most=2)
    for _ in range(5):
        assert _strike(strikes, b"a") == [False]
        strikes.clear(b"a")


def test_no_more_strangers_are_remembered_than_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_REMEMBERED", 2)
    strikes = StrikeCounter(most=3)
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
