"""The server: bind, log the URL, serve until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from ipcsync._logs import fields
from ipcsync_observer.app import Observer
from ipcsync_observer.connections import PatientProtocol
from ipcsync_observer.sampler import Sampler

log = logging.getLogger("ipcsync.observer")

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_BACKLOG = 128


class _Server(uvicorn.Server):
    """A server that leaves signals alone: by its own handling it would end by the signal, not with status 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; OSError if the address cannot be used."""
    (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    listening = socket.socket(family, kind)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


async def serve(listening: socket.socket, sampler: Sampler) -> None:
    """Serve on a socket until SIGTERM or Ctrl-C."""
    host, port = listening.getsockname()[:2]
    is_loopback = ipaddress.ip_address(host).is_loopback
    observer = Observer(sampler)
    config = uvicorn.Config(
        observer.app(_LOOPBACK_NAMES | {host} if is_loopback else None),
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        http=PatientProtocol,
        timeout_graceful_shutdown=2,
    )
    server = _Server(config)

    def end() -> None:
        server.should_exit = True
        observer.ending.set()  # of streams, and so of the requests of open pages

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    log.info("ready", extra=fields(url=f"http://{f'[{host}]' if ':' in host else host}:{port}/"))
    if not is_loopback:
        log.warning("any process that reaches this address can read what it serves", extra=fields(host=host))
    await server.serve(sockets=[listening])
    log.info("stopped")
