"""A client that says what it is told to, well-formed or not: a bare ZeroMQ socket, or a bare Unix one."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
import zmq

import ipcsync
from ipcsync import _drivers
from ipcsync._wire import codec, endpoints, messages
from ipcsync._wire.messages import VERSION, Message
from tests.kit.until import DEADLINE_S

if TYPE_CHECKING:
    from typing_extensions import Self

M = TypeVar("M", bound=Message)
_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()


class Raw:
    """A DEALER socket with no manners. A context manager that closes it."""

    def __init__(self, endpoint: str, *, routing: bytes = b"", receive_queue: int = 1000) -> None:
        self.socket = _context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvhwm = receive_queue
        if routing:
            self.socket.setsockopt(zmq.ROUTING_ID, routing)
        self.socket.connect(endpoint)
        self.ids = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *frames: bytes) -> None:
        """Send one message; AssertionError if it cannot be sent."""
        assert self.socket.poll(int(DEADLINE_S * 1000), zmq.POLLOUT), "the socket takes nothing"
        self.socket.send_multipart(frames, zmq.NOBLOCK)

    def receive_bytes(self, timeout: float = DEADLINE_S) -> bytes | None:
        """The next reply's frame, None if none comes in time."""
        if not self.socket.poll(int(timeout * 1000)):
            return None
        (frame,) = self.socket.recv_multipart(zmq.NOBLOCK)
        return frame

    def receive(self, timeout: float = DEADLINE_S) -> tuple[int, Message]:
        """(request id, body) of the next reply."""
        frame = self.receive_bytes(timeout)
        assert frame is not None, "no reply"
        return codec.decode_reply(frame)

    def exchange(self, frame: bytes) -> bytes:
        """The reply's frame to a frame."""
        self.send(frame)
        reply = self.receive_bytes()
        assert reply is not None, "no reply"
        return reply

    def ask(self, body: Message, token: bytes, kind: type[M], request_id: int | None = None) -> M:
        """The reply to a request, which must be of type `kind`."""
        chosen = next(self.ids) if request_id is None else request_id
        self.send(codec.encode_request(chosen, body, token, 0))
        answered = -1
        while answered != chosen:  # of what was sent before
            answered, reply = self.receive()
        assert isinstance(reply, kind), reply
        return reply

    def refused(self, body: Message, token: bytes) -> ipcsync.IpcSyncError:
        """The error that a request is answered with."""
        return codec.error_of(self.ask(body, token, messages.Failure))

    def hello(self, name: str = "raw", nonce: bytes = b"", lease_ttl: float = 60.0) -> messages.Welcome:
        """Open a session (which lives by its long TTL, since nothing beats here)."""
        body = messages.Hello(nonce or os.urandom(16), _drivers.name(), name, lease_ttl=lease_ttl)
        return self.ask(body, b"", messages.Welcome)


def request(op: Any = "sessions", body: Any = None, **parts: Any) -> bytes:
    """A frame put together by hand; `parts` are version, id, token, deadline."""
    fields = {"version": VERSION, "id": 7, "token": b"", "deadline": 0, **parts}
    head = [fields["version"], fields["id"], op, fields["token"], fields["deadline"]]
    return bytes(msgpack.packb([*head, {} if body is None else body]))


def failure_in(frame: bytes) -> messages.Failure:
    """The failure in a reply's frame."""
    _, body = codec.decode_reply(frame)
    assert isinstance(body, messages.Failure), body
    return body


@contextlib.contextmanager
def unix_socket(endpoint: str) -> Iterator[socket.socket]:
    """A bare connection to an endpoint."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(DEADLINE_S)
        connection.connect(endpoints.socket_path(endpoint))
        yield connection


def await_end(connection: socket.socket) -> bytes:
    """What the other side says until it closes the connection."""
    said = b""
    with contextlib.suppress(ConnectionResetError):  # an end as well
        while chunk := connection.recv(4096):
            said += chunk
    return said


def resident_kib(pid: int) -> int:
    """Resident memory of a process."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


def run_coordinator(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A coordinator that is expected to end by itself, with what it said."""
    return subprocess.run(
        [sys.executable, "-m", "ipcsync_coordinator", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def refusals(client: ipcsync.Client) -> dict[str, int]:
    """How many requests the coordinator refused, by reason."""
    return dict(client.stats()["refusals"])


def assert_serves(coordinator: ipcsync.Coordinator, client: ipcsync.Client) -> None:
    """The one who is there goes on, and so can a new one."""
    assert coordinator.is_running
    assert client.list_sessions()
    with ipcsync.connect(coordinator.endpoint, name="after"):
        assert {session.name for session in client.list_sessions()} >= {"main", "after"}
