"""The clients of this process: which one a point belongs to, and their end with the program's."""

from __future__ import annotations

import atexit
import functools
import logging
import weakref
from typing import TYPE_CHECKING

from ipcsync._native import fork
from ipcsync.errors import ConnectError

if TYPE_CHECKING:
    from ipcsync._session.lease import Lease
    from ipcsync.client.client import Client

log = logging.getLogger("ipcsync")

_clients: dict[bytes, list[weakref.ref[Client]]] = {}
_leases: weakref.WeakSet[Lease] = weakref.WeakSet()  # some linger after their client was closed


def add(client: Client) -> None:
    """Know of a client, until `remove`, and of its lease for as long as that has a thread."""
    _clients.setdefault(client.epoch, []).append(weakref.ref(client))
    _leases.add(client._lease)
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


def _give_up_lives() -> None:
    """What still lingers is done for. C's exit handlers come next, a driver's too, and may take long."""
    for lease in list(_leases):
        lease.give_up_life()


@functools.cache
def _arm_exit() -> None:
    atexit.register(_give_up_lives)  # runs after the next one
    atexit.register(_close_at_exit)
