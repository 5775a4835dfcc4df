"""The clients of this process: which one a point belongs to, and their end with the program's."""

from __future__ import annotations

import atexit
import functools
import logging
import weakref
from typing import TYPE_CHECKING

from ipcsync.errors import ConnectError
from ipcsync.native import fork

if TYPE_CHECKING:
    from ipcsync.client.client import Client

log = logging.getLogger("ipcsync")

_clients: dict[bytes, list[weakref.ref[Client]]] = {}


def add(client: Client) -> None:
    """Know of a client, until `remove`."""
    _clients.setdefault(client.epoch, []).append(weakref.ref(client))
    _arm_exit()


def remove(client: Client) -> None:
    """Know of it no more."""
    _clients[client.epoch] = [ref for ref in _clients.get(client.epoch, []) if ref() not in {None, client}]


def client_of(epoch: bytes) -> Client:
    """This process's client of an epoch, the first if there are several. ConnectError without one."""
    fork.check()
    for reference in _clients.get(epoch, []):
        client = reference()
        if client is not None and client.is_connected:
            return client
    raise ConnectError("this point needs a client of its coordinator in this process: call ipcsync.connect() first")


def _close_at_exit() -> None:
    """Close what the program left open, so that work it finished stays good: an exit without a word is a death."""
    for references in list(_clients.values()):
        for reference in references:
            client = reference()
            if client is not None:
                try:
                    client.close()
                except Exception:  # one that fails must not keep the others from it
                    log.exception("closing %r failed", client)


@functools.cache
def _arm_exit() -> None:
    atexit.register(_close_at_exit)
