"""What a coordinator works with: inherited from its keeper over a socketpair, or created by itself in one process."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from ipcsync._board import Board, layout
from ipcsync._board.runtime_dir import KEEPER, RELOAD, Place
from ipcsync._linux import files
from ipcsync._linux.child import die_with
from ipcsync._wire import codec, messages
from ipcsync_keeper import link, resources
from ipcsync_keeper.config import Settings
from ipcsync_keeper.link import DriverClient, DriverThread, Link, Peer
from ipcsync_keeper.resources import JournalFiles, Resources, StartupConfig

_OOM_SCORE = 200  # above the keeper's, since a coordinator can be replaced


@dataclass(frozen=True)
class Startup:
    """Configuration, board, place, listening sockets (of requests, of the feed), journal, and the driver.

    `resources` are this process's own if it has no keeper.
    """

    config: StartupConfig
    board: Board
    place: Place
    sockets: tuple[int, int]
    journal: JournalFiles
    driver: DriverClient
    resources: Resources | None = None


def create(settings: Settings) -> Startup:
    """Create everything in this process, with a thread for the driver."""
    resources = Resources(settings)
    try:
        ours, theirs = map(Link, socket.socketpair())
        DriverThread(resources).serve(Peer(theirs, os.getpid()))
        config = _config(ours)
    except BaseException:  # there may be no descriptor or thread for it
        resources.close()
        raise
    board, place, journal = resources.board, resources.directory, resources.journal
    requests, feed = (listening.detach() for listening in resources.sockets)
    return Startup(config, board, place, (requests, feed), journal, DriverClient(ours), resources)


def inherit(kept: str, settings: Mapping[str, object]) -> Startup:
    """Take over what a keeper has, once it says that this process is to serve; until then nothing is touched.

    `kept` are the keeper's pid and the descriptors that it passed on; it is sent the `settings` that were read here.
    SystemExit if the keeper is gone by then.
    """
    keeper, pair, *rest = map(int, kept.split(","))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, RELOAD):
        signal.signal(number, signal.SIG_IGN)  # the keeper handles them
    die_with(keeper)
    with suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:  # a sandbox may forbid it
        score = int(file.read())
        file.seek(0)
        file.write(str(min(score + _OOM_SCORE, 1000)))
    end = Link(socket.socket(fileno=pair))
    try:
        end.send("serve", [versions(), settings])
        config = _config(end)
    except EOFError:
        sys.exit(0)  # the keeper does not need this process any more
    words, first, second, requests, feed, lock, board_file = rest  # as a keeper of this version passes them
    for descriptor in rest:
        fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    _be_the_only_one(words)
    journal = JournalFiles(words, (first, second))
    board = Board(board_file, config.board)  # its name may be gone by now, which ends no session
    place = Place(config.settings.runtime_dir, lock, config.keeper_pid, KEEPER)
    return Startup(config, board, place, (requests, feed), journal, DriverClient(end))


def _config(end: Link) -> StartupConfig:
    answer = end.receive(None)
    assert answer is not None
    return msgspec.convert(answer[1], StartupConfig)


def refuse(kept: str, why: str) -> None:
    """Report to the keeper why no coordinator can start with these settings: it logs that, and answers a reload."""
    pair = int(kept.split(",")[1])
    with suppress(EOFError):
        Link(socket.socket(fileno=pair)).send("refuse", [why])


def _be_the_only_one(words: int) -> None:
    # Through an open file of this process alone, so that the journal's lock ends with this process.
    if not files.try_lock(os.open(f"/proc/self/fd/{words}", os.O_RDWR | os.O_CLOEXEC), 0):
        raise RuntimeError("another coordinator still has the journal")


def versions() -> dict[str, str]:
    """What two coordinators must have in common so that one can continue the other's work.

    All of the messages counts, since live clients use the old ones.
    """
    effects = {op: kind.effect for op, kind in messages.REQUESTS.items()}
    described = msgspec.json.encode([codec.wire(), effects], order="sorted")
    digest = hashlib.sha256(described).hexdigest()[:16]
    return {
        "journal": str(resources.JOURNAL_VERSION),
        "board": str(layout.VERSION),
        "wire": f"{messages.VERSION}-{digest}",
        "keeper": str(link.VERSION),
    }
