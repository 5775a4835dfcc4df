"""Sampling the coordinator once a period, on a thread, and the data for the page."""

from __future__ import annotations

import logging
import threading
import time
from typing import cast

from msgspec import UNSET, Struct
from msgspec.structs import replace

from ipcsync import AttachmentInfo, BridgeInfo, IpcSyncError, SessionInfo
from ipcsync._logs import fields
from ipcsync._rates import Event, Tracks
from ipcsync._session.handshake import Reader
from ipcsync._wire import endpoints
from ipcsync.typing import CoordinatorStats

log = logging.getLogger("ipcsync.observer")

READY_S = 1.0  # within which a coordinator that is ready answers
_BRIDGE_S = 0.25  # within which a bridge answers
_LANE_S = 60.0
_ROWS = 300  # events, and sessions, in one answer; the rest is counted
_LINKS = 2000


class State(Struct, frozen=True):
    """What the page shows, `at` seconds after the observer began.

    While `ready` is false, `problem` says why, and the other fields are of the last answers; before the first of a
    coordinator, `stats` and the lists are empty. `bridge` is null if there is none, or it did not answer.
    """

    at: float
    problem: str
    ready: bool
    period_s: float
    endpoint: str
    epoch: str
    stats: CoordinatorStats
    sessions: list[SessionInfo]
    sessions_total: int
    events: list[Event]
    events_found: int
    events_total: int
    links: list[AttachmentInfo]
    bridge: BridgeInfo | None


class Sampler:
    """A thread that takes a sample every `period_s` seconds, of whichever coordinator serves then: `latest`.

    That is ready if each answer came within a second. `connects` counts the coordinators whose events and sessions were
    others than before.
    """

    def __init__(self, endpoint: str | None, period_s: float = 1.0) -> None:
        self._reader = Reader(endpoint or endpoints.default_endpoint(), READY_S)
        self.period_s = period_s
        self._began = time.monotonic()
        self._epoch = ""
        self._tracks = Tracks(max(2, min(240, round(_LANE_S / period_s))))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ipcsync-observer", daemon=True)
        problem, stats = "no sample was taken yet", cast("CoordinatorStats", {})
        self.latest = State(0.0, problem, False, period_s, "", "", stats, [], 0, [], 0, 0, [], None)
        self.connects = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop, within a few seconds also if the coordinator does not answer."""
        self._stop.set()
        self._thread.join()
        self._reader.close()

    def state(self, contains: str = "", *, with_lanes: bool = True) -> State:
        """All data of the page.

        If more than 300 events have `contains` in their names (in any case), the broken, stuck and busiest ones.
        """
        latest = self.latest
        wanted = contains.casefold()
        events = [row for row in latest.events if wanted in row.name.casefold()]
        found = len(events)
        if found > _ROWS:
            events.sort(key=lambda row: (row.state != "broken", -row.pending_s, -(row.rate or 0.0), row.name))
            del events[_ROWS:]
        places = {(row.slot, row.incarnation) for row in events}
        return replace(
            latest,
            sessions=latest.sessions[:_ROWS],
            events=events if with_lanes else [replace(row, lane=UNSET) for row in events],
            events_found=found,
            links=[link for link in latest.links if (link.slot, link.incarnation) in places],
        )

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._take()
            except IpcSyncError as error:
                self._fail(str(error))
            except Exception as error:  # the next sample may succeed; the page and /healthz show the failure
                log.exception("sample failed")
                self._fail(f"{type(error).__name__}: {error}")
            self._stop.wait(self.period_s)

    def _take(self) -> None:
        reader = self._reader
        stats = reader.stats()
        if stats["epoch"] != self._epoch:
            self._epoch = stats["epoch"]
            self.connects += 1
            told = fields(endpoint=reader.endpoint, epoch=self._epoch[:8], version=stats["version"])
            log.info("connected", extra=told)
        infos = reader.list_events()
        now = time.monotonic() - self._began
        sessions, links = reader.list_sessions(), reader.list_attachments(_LINKS)
        events = self._tracks.see(self._epoch, infos, now)
        self.latest = State(
            at=round(now, 2),
            problem="",
            ready=True,
            period_s=self.period_s,
            endpoint=reader.endpoint,
            epoch=self._epoch,
            stats=stats,
            sessions=sessions,
            sessions_total=len(sessions),
            events=events,
            events_found=len(events),
            events_total=len(events),
            links=links,
            bridge=_bridge_of(reader),
        )

    def _fail(self, problem: str) -> None:
        if not self.latest.problem:
            log.warning("coordinator not ready", extra=fields(why=problem))
        self.latest = replace(self.latest, problem=problem, ready=False)


def _bridge_of(reader: Reader) -> BridgeInfo | None:
    """The bridge, None if there is none or it does not answer; no other figure depends on it."""
    try:
        return reader.bridge(_BRIDGE_S)
    except IpcSyncError:
        return None
