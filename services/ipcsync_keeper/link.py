"""The socketpair between keeper and coordinator: MessagePack frames, each behind its length.

A request is [operation, arguments], its answer [is an error, value]; answers come in the order of the requests. The
keeper only answers, on a thread, since driver calls may take long; without a keeper a thread of the coordinator does.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

import msgspec

from ipcsync._linux.child import ends_within, in_words, spawn
from ipcsync._logs import fields
from ipcsync._wire import codec
from ipcsync._wire.messages import Failure
from ipcsync.errors import IpcSyncError, WaitTimeout
from ipcsync_keeper.resources import Resources, SharedCudaEvent

log = logging.getLogger("ipcsync.coordinator")

VERSION = 8  # of the requests, and of what a coordinator inherits
_PATIENCE_S = 10.0
_KILLED_S = 5.0  # a killed process that takes longer is stuck in the kernel, and is left alone
_LENGTH = 4
_CHUNK = 1 << 18


# --- both ends --------------------------------------------------------------------------------------------------------


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
        while (frame := self._take()) is None:
            poll = select.poll()
            poll.register(self.socket, select.POLLIN if self.flush() else select.POLLIN | select.POLLOUT)
            left_ms = None if deadline is None else max(0, math.ceil((deadline - time.monotonic()) * 1000))
            if not poll.poll(left_ms):
                return None
            self._read()
        message: list[Any] = msgspec.msgpack.decode(frame)
        return message

    def _take(self) -> bytes | None:
        end = _LENGTH + int.from_bytes(self._in[:_LENGTH], "little")  # beyond what there is while the length is cut
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
        with suppress(OSError):  # the other end was closed first
            self.socket.shutdown(socket.SHUT_RDWR)


# --- the coordinator's end --------------------------------------------------------------------------------------------


class DriverClient:
    """The driver, asked over a link. Once the other end is gone, this process ends."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._then: deque[Callable[[Any], object]] = deque()  # who gets the next answers
        self._is_late = False  # the last question was not answered in time, and still is not

    def make(self, device: str, count: int, then: Callable[[list[SharedCudaEvent]], None]) -> None:
        """Make interprocess events, numbered and exported. `then` gets them, also those that come too late.

        Raises the driver's errors, and WaitTimeout if there is no answer within 10 s.
        """
        answers: list[Any] = []

        def take(answer: Any) -> None:
            self._is_late = False
            answers.append(answer)
            if not isinstance(answer, IpcSyncError):
                then(msgspec.convert(answer, list[SharedCudaEvent]))

        try:
            if self._is_late:
                self.drain()
            if self._is_late:  # the answers come in order, and the loop must not wait for each once more
                raise WaitTimeout("the driver has not answered an earlier request yet", timeout=_PATIENCE_S)
            self._post("make", [device, count], take)
            deadline = time.monotonic() + _PATIENCE_S
            while not answers:
                left = deadline - time.monotonic()
                if left <= 0 or not self._take_one(left):
                    self._is_late = True
                    raise WaitTimeout(f"the driver did not answer within {_PATIENCE_S:g} s", timeout=_PATIENCE_S)
        except EOFError:
            _end_at_once()
        if isinstance(answers[0], IpcSyncError):
            raise answers[0]

    def destroy(self, serials: list[int], then: Callable[[int], None]) -> None:
        """Destroy these events without waiting; `then` gets what `EventStore.destroy` returns. An error is logged."""

        def take(answer: Any) -> None:
            if not _is_logged_error(answer):
                then(int(answer))

        self._post("destroy", [serials], take)

    def report_serving(self) -> None:
        self._post("serving", [], _is_logged_error)

    def drain(self) -> None:
        """From the loop: read answers, and send what had no room. EOFError if the other end is gone."""
        while self._take_one(0.0):
            continue

    def _post(self, op: str, arguments: list[Any], then: Callable[[Any], object]) -> None:
        self._then.append(then)
        try:
            self.link.send(op, arguments)
        except EOFError:
            _end_at_once()

    def _take_one(self, timeout: float) -> bool:
        message = self.link.receive(timeout)
        if message is None:
            return False
        is_error, value = message
        self._then.popleft()(codec.error_of(msgspec.convert(value, Failure)) if is_error else value)
        return True


def _is_logged_error(answer: object) -> bool:
    if is_error := isinstance(answer, IpcSyncError):
        log.error("the driver could not do a request", extra=fields(why=answer))
    return is_error


def _end_at_once() -> NoReturn:
    """End as if killed: the keeper has released this process, perhaps in the middle of a request.

    What is not committed did not happen, and has no answer: the client asks the next coordinator. Any other end would
    commit a part of it, or answer it.
    """
    os._exit(1)


# --- the keeper's end -------------------------------------------------------------------------------------------------


class Peer:
    """A coordinator behind a link. Without a keeper it is this process itself."""

    def __init__(self, link: Link, pid: int) -> None:
        self.link = link
        self.pid = pid
        self.has_config = False
        self.is_asking = False  # it waits for the driver
        self.is_serving = False  # it has said that it serves

    def kill(self) -> None:
        """End it at once: its next request finds the link closed."""
        self.link.close()


class DriverThread:
    """Answers one coordinator after the other. `wake` is called when one serves, or hung up."""

    def __init__(self, resources: Resources, wake: Callable[[], None] = lambda: None) -> None:
        self._resources = resources
        self._wake = wake
        self._waiting: queue.SimpleQueue[tuple[Peer, int] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="ipcsync-driver", daemon=True).start()

    def serve(self, peer: Peer, unserved_ns: int = 0) -> None:
        """Have a coordinator serve, and answer it from now on; `unserved_ns` is since when none serves."""
        self._waiting.put((peer, unserved_ns))

    def end(self) -> None:
        """Have its thread end once it has its answer; what it makes beside the next one's, a later start destroys."""
        self._waiting.put(None)

    def _run(self) -> None:
        for peer, unserved_ns in iter(self._waiting.get, None):
            try:
                config = self._resources.next_config(unserved_ns)
                peer.has_config = True
                peer.link.send(False, config)
                while True:
                    message = peer.link.receive(None)
                    assert message is not None
                    peer.is_asking = True
                    peer.link.send(*self._answer(peer, *message))
                    peer.is_asking = False
            except EOFError:  # noqa: PERF203 - of one coordinator: the next one is answered
                peer.is_asking = False  # also if it hung up before its answer came
                self._wake()
            except Exception:  # invalid requests: the next coordinator may be better
                log.exception("a coordinator is killed for an invalid request", extra=fields(pid=peer.pid))
                peer.kill()

    def _answer(self, peer: Peer, op: str, arguments: list[object]) -> tuple[bool, object]:
        """(whether it is an error, the value)."""
        if op == "serving":
            peer.is_serving = True
            self._wake()
            return False, None
        try:
            return False, getattr(self._resources.events, op)(*arguments)
        except IpcSyncError as error:
            return True, codec.failure_of(error)
        except Exception as error:  # whatever failed, the next request is answered
            log.exception("a request failed", extra=fields(op=op))
            return True, codec.failure_of(IpcSyncError(f"an internal error, see the log: {type(error).__name__}"))


class CoordinatorProcess(Peer):
    """A coordinator process, which imports its modules and waits until it is told to serve.

    The keeper's main thread starts it, and it ends with that (PR_SET_PDEATHSIG). OSError if no process can be started.
    """

    def __init__(self, resources: Resources, command: list[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as undo:
            undo.callback(ours.close)
            with open(resources.board.file, "r+b") as board:  # opened anew, so without the keeper's lifeline
                descriptors = [theirs.fileno(), *resources.descriptors, board.fileno()]
                kept = ",".join(map(str, [os.getpid(), *descriptors]))
                self._process = spawn([*command, "--kept", kept], fds=descriptors)
            undo.pop_all()
        super().__init__(Link(ours), self._process.pid)
        self.began = time.monotonic()  # the start of waiting, later of serving
        self.versions: dict[str, str] | None = None  # its versions, from its greeting
        self.settings: dict[str, object] = {}  # and what it has read of them
        self.refusal = ""  # or why it cannot start
        self.was_started = self.was_dismissed = False  # to serve, once the driver is free for it; to end
        self.has_hung = self.was_killed = False
        self.is_silent = True  # until its greeting comes

    @property
    def is_dead(self) -> bool:
        """Whether it has ended. The keeper's signals say when to ask (SIGCHLD)."""
        return self._process.poll() is not None

    def receive_greeting(self) -> None:
        """Read its greeting, if it has come. A process with another greeting is killed."""
        try:
            message = self.link.receive()
            if message is not None:
                what, arguments = message
                self.is_silent = False
                if what == "refuse":
                    self.refusal = str(arguments[0])
                else:
                    versions, self.settings = arguments
                    self.versions = msgspec.convert(versions, dict[str, str])
        except EOFError:
            self.is_silent = False  # it has ended, or has half a minute to do so
        except Exception as error:  # noqa: BLE001 - the code on disk may be anything by now
            log.warning("not a coordinator's greeting", extra=fields(pid=self.pid, why=error))
            self.kill()

    def how_it_ended(self) -> str:
        """Its exit status in words, and what it said of it; it has ended."""
        how = in_words(self.end())
        return f"{how}: {self.refusal}" if self.refusal else how

    def dismiss(self) -> None:
        """Have it end after its current request."""
        self.was_dismissed = True
        self.link.close()

    def kill(self) -> None:
        """Kill it, stopped or not."""
        self.was_killed, self.is_silent = True, False
        self._process.kill()

    def end(self, seconds: float = 0.0) -> int | None:
        """Have it end, killed after `seconds`; returns its exit status (negative: the signal), also if called again."""
        if self.is_silent:
            self.receive_greeting()
        self.link.close()
        if not ends_within(self._process, seconds):
            self.kill()
            ends_within(self._process, _KILLED_S)
        return self._process.returncode
