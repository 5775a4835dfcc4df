"""The gate that lets connections in while descriptors are free."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from ipcsync_coordinator import gate
from ipcsync_keeper.resources import listen
from tests.kit.until import until

_CROWD = 100


class _Place:
    """A place whose sockets cannot be hidden, so that connections go on to arrive at a shut gate."""

    def shut(self) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def reopen(self) -> None: ...


@contextmanager
def _gate(path: Path, told: list[str]) -> Iterator[gate.Gate]:
    """A gate before one socket at a path."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        held = gate.Gate(_Place(), told.append)  # type: ignore[arg-type]
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
        before = gate.count()
        monkeypatch.setattr(gate, "_usable", lambda: before + 20)
        _connect(crowd, tmp_path / "s")
        until(lambda: told == ["descriptors"], "it is shut")
        assert _accepted(tmp_path / "s") <= 21  # with the one that was allowed before it looked
        for one in crowd[:10]:
            one.close()
        until(lambda: told.count("descriptors") == 2, "it was opened, and shut again")
        assert _accepted(tmp_path / "s") <= 31  # for each descriptor that was closed here


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
