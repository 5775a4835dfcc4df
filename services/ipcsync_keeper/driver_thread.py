"""The other end of the link: a thread answers the coordinator's requests, since driver calls may take long."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ipcsync._logs import fields
from ipcsync._wire import codec
from ipcsync.errors import IpcSyncError
from ipcsync_keeper.link import Link
from ipcsync_keeper.resources import Resources

log = logging.getLogger("ipcsync.coordinator")


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
        self._waiting: queue.SimpleQueue[tuple[Peer, int]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="ipcsync-driver", daemon=True).start()

    def serve(self, peer: Peer, unserved_ns: int = 0) -> None:
        """Have a coordinator serve, and answer it from now on; `unserved_ns` is since when none serves."""
        self._waiting.put((peer, unserved_ns))

    def _run(self) -> None:
        while True:
            peer, unserved_ns = self._waiting.get()
            try:
                peer.link.send(False, self._resources.next_config(unserved_ns))
                peer.has_config = True
                while True:
                    message = peer.link.receive(None)
                    assert message is not None
                    peer.is_asking = True
                    peer.link.send(*self._answer(peer, *message))
                    peer.is_asking = False
            except EOFError:
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
