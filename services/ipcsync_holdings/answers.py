"""The keeper's end of the link: a thread answers the coordinator's requests, since driver calls may take long."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from ipcsync._logs import fields
from ipcsync._wire import codec
from ipcsync.errors import IpcSyncError
from ipcsync_holdings.holdings import Holdings, Terms
from ipcsync_holdings.link import Link

log = logging.getLogger("ipcsync.coordinator")


class Asker(Protocol):
    """A coordinator's process: `is_asking` while it waits for the driver, `is_serving` once it has said so."""

    pid: int
    link: Link
    is_asking: bool
    is_serving: bool

    def begin(self, terms: Terms) -> None:
        """Tell it to serve."""

    def kill(self) -> None:
        """Kill it."""


class Answers:
    """Works over `holdings` for one coordinator after the other. `wake` is called when one serves, or hung up."""

    def __init__(self, holdings: Holdings, wake: Callable[[], None]) -> None:
        self._holdings = holdings
        self._wake = wake
        self._waiting: queue.SimpleQueue[tuple[Asker, int]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="ipcsync-driver", daemon=True).start()

    def serve(self, asker: Asker, unserved_ns: int) -> None:
        """Tell a coordinator to serve, and answer it from now on; `unserved_ns` is since when none serves."""
        self._waiting.put((asker, unserved_ns))

    def _run(self) -> None:
        while True:
            asker, unserved_ns = self._waiting.get()
            try:
                asker.begin(self._holdings.next_terms(unserved_ns))
                while True:
                    self._answer_one(asker)
            except EOFError:
                self._wake()
            except Exception:  # invalid requests: the next coordinator may be better
                log.exception("a coordinator is killed for an invalid request", extra=fields(pid=asker.pid))
                asker.kill()

    def _answer_one(self, asker: Asker) -> None:
        message = asker.link.receive(None)
        assert message is not None
        number, op, arguments = message
        asker.is_asking = True
        asker.link.send(number, *self._answer(asker, op, arguments))
        asker.is_asking = False

    def _answer(self, asker: Asker, op: str, arguments: list[object]) -> tuple[bool, object]:
        """(whether it is an error, the value)."""
        if op == "serving":
            asker.is_serving = True
            self._wake()
            return False, None
        try:
            return False, getattr(self._holdings.events, op)(*arguments)
        except IpcSyncError as error:
            return True, codec.failure_of(error)
        except Exception as error:  # whatever failed, the next request is answered
            log.exception("a request failed", extra=fields(op=op))
            return True, codec.failure_of(IpcSyncError(f"the keeper has an internal error: {type(error).__name__}"))
