"""Rows 4, 5, 16, 18, 19 and 53: leases that run out, are asked for too late, or are asked for wrongly."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ipcsync
from ipcsync._deadline import deadline_of
from ipcsync._session.connection import Request
from ipcsync._wire import messages
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from ipcsync_keeper import config
from tests.faults import actions, fixtures, patched
from tests.faults.fixtures import Blocked, until_lost
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.driver, pytest.mark.keeper, pytest.mark.own_coordinator, pytest.mark.process]

TTL_S = 2.0


@pytest.fixture
def owner(peer: Peer, coordinator: ipcsync.Coordinator, engine: EngineName) -> Peer:
    """A peer that records on the event "e", with a short lease and one record complete."""
    peer.call(actions.open_recorder, coordinator.endpoint, "e", engine, TTL_S)
    peer.call(actions.record_complete, "e")
    return peer


class Successor:
    """Another session that opened the name anew, with a record that is not complete."""

    def __init__(self, client: ipcsync.Client, engine: EngineName) -> None:
        self.stream = ipcsync.Stream()
        self.gate = StreamGate(self.stream)
        self.event = client.event("e", recorder=True, engine=engine)
        self.point = self.event.record(self.stream)

    def assert_untouched(self) -> None:
        assert (self.event.generation, self.event.completed, self.event.state) == (1, 0, "open")
        assert not self.point.query()

    def end(self) -> None:
        """Its own work, and nobody else's, completes it."""
        self.assert_untouched()
        self.gate.open()
        fixtures.finish(self.point)
        for generation in range(2, 8):
            assert self.event.record(self.stream).generation == generation
        fixtures.finish(self.event.at(7))


@pytest.fixture
def new_successor(client: ipcsync.Client, engine: EngineName) -> Iterator[Callable[[], Successor]]:
    """Makes them; their gates are open after the test."""
    made: list[Successor] = []

    def make() -> Successor:
        made.append(Successor(client, engine))
        return made[-1]

    yield make
    for successor in made:
        successor.gate.open()


ALL_EXPIRED = dict.fromkeys(("record", "at", "open", "open again", "stats", "unnamed"), "SessionExpired")


def _assert_the_process_lets_go(client: ipcsync.Client, owner: Peer) -> None:
    """Its slot waits for it in quarantine, however long, and is free once it closes."""
    assert client.stats()["quarantined"] == 1
    owner.call(remote.close_client)
    until(lambda: client.stats()["quarantined"] == 0, "the end of the quarantine")


# --- row 4 ------------------------------------------------------------------------------------------------------------


def test_row_04_a_stopped_process_finds_its_session_expired_and_reaches_nobody(
    client: ipcsync.Client, owner: Peer, new_successor: Callable[[], Successor]
) -> None:
    old = client.event("e")
    waiting = Blocked(old.at(2).synchronize)

    fixtures.stop(owner.pid)
    until_lost(client, "ttl")

    assert isinstance(waiting.outcome(), ipcsync.RecorderLost)
    assert old.at(1).query()
    successor = new_successor()
    assert successor.event._engine.slot != old._engine.slot
    old.close()
    fixtures.resume(owner.pid)
    assert owner.call(actions.errors_of_every_use, "e") == ALL_EXPIRED
    assert owner.call(actions.errors_of_every_use, "e") == ALL_EXPIRED  # for good
    successor.assert_untouched()
    _assert_the_process_lets_go(client, owner)
    successor.end()
    assert client.stats()["deaths"] == {"pidfd": 0, "ttl": 1}


@pytest.mark.parametrize("engine", [pytest.param("event", marks=pytest.mark.thorough), "timeline"])
def test_row_04_a_process_that_is_stopped_while_its_last_records_drain_loses_them(
    client: ipcsync.Client, owner: Peer
) -> None:
    event = client.event("e")
    owner.call(remote.hold)
    point = client.point(owner.call(actions.record, "e"))
    session = client._session.lease.board.session(event._engine.line.recorder & 0xFFFF)
    owner.call(remote.close_client)
    waiting = Blocked(point.synchronize)
    closed_ns = time.monotonic_ns()
    until(lambda: session.heartbeat > closed_ns + 1.5e9 * TTL_S, "it drains for longer than its lease")
    assert event.state == "closed", "a recorder that runs may take its time"

    fixtures.stop(owner.pid)

    lost = waiting.outcome()
    assert isinstance(lost, ipcsync.RecorderLost)
    assert lost.cause == "expired"
    assert event.at(1).query()
    fixtures.resume(owner.pid)
    event.close()
    owner.call(remote.let_go)
    until(lambda: client.stats()["pool_in_use"] == 0, "the slot is free once it has drained")


@pytest.mark.parametrize(
    ("engine", "step"),
    [
        pytest.param(
            engine, step, marks=[] if (engine == "event") == (step == "before the wake") else pytest.mark.thorough
        )
        for step in actions.STEPS
        for engine in fixtures.ENGINES
    ],
)
def test_row_04_a_process_stopped_inside_a_record_reaches_nobody_when_it_goes_on(
    client: ipcsync.Client, owner: Peer, new_successor: Callable[[], Successor], step: str
) -> None:
    old = client.event("e")
    owner.begin(actions.stop_in_record, "e", step)
    until(lambda: fixtures.state_of(owner.pid) == "T", "the recorder stopped")
    until_lost(client, "ttl")
    assert old.state == "broken"
    was_complete = old.completed == 2  # told before the break: the wake alone was missing
    assert not was_complete or step == "before the wake"
    successor = new_successor()

    fixtures.resume(owner.pid)

    assert owner.result() == "SessionExpired"
    if not was_complete:
        for _ in range(2):
            with pytest.raises(ipcsync.RecorderLost):
                old.at(2).query()
    assert old.at(1).query()
    assert old.completed == (2 if was_complete else 1)
    successor.assert_untouched()
    old.close()
    _assert_the_process_lets_go(client, owner)
    successor.end()


def test_row_04_a_process_stopped_inside_a_heartbeat_keeps_its_line_and_harms_no_later_session(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, new_peer: Callable[[], Peer]
) -> None:
    """It has no event: what it could still write to, and what its lifeline lies on, is its session's line alone."""
    stopped, later = new_peer(), new_peer()
    line = stopped.call(actions.connect, coordinator.endpoint, "stopped", TTL_S)
    stopped.call(actions.stop_in_heartbeat)
    until(lambda: fixtures.state_of(stopped.pid) == "T", "its heartbeat stopped")
    until_lost(client, "ttl")
    assert later.call(actions.connect, coordinator.endpoint, "later") != line
    fixtures.resume(stopped.pid)
    assert stopped.call(actions.error_of, actions.stats) == "SessionExpired"
    assert [info.name for info in client.list_sessions()] == ["main", "later"]
    stopped.kill()
    until(lambda: not _is_attached(client, line), "the line free again")
    assert client.stats()["deaths"] == {"pidfd": 0, "ttl": 1}


def _is_attached(client: ipcsync.Client, line: int) -> bool:
    return bool(client._session.lease.board.session(line).state)


# --- row 5 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [pytest.param("event", marks=pytest.mark.thorough), "timeline"])
def test_row_05_a_process_that_held_the_gil_too_long_finds_its_session_expired(
    client: ipcsync.Client, owner: Peer, new_successor: Callable[[], Successor]
) -> None:
    old = client.event("e")
    owner.begin(actions.hold_the_gil_and_record, "e", 2 * TTL_S)
    until_lost(client, "ttl")
    assert old.state == "broken"
    old.close()
    successor = new_successor()
    assert owner.result() == "SessionExpired"
    assert owner.call(actions.errors_of_every_use, "e") == ALL_EXPIRED
    successor.assert_untouched()
    _assert_the_process_lets_go(client, owner)
    successor.end()


def test_row_05_calls_that_come_without_a_pause_keep_no_session_from_its_heartbeat(
    new_client: Callable[..., ipcsync.Client],
) -> None:
    busy = new_client("busy", lease_ttl=2.0)  # a machine that is busy too may keep it from a beat for a while
    owner, line, is_over = busy._session.owner, busy._session.lease.line, threading.Event()

    def work() -> None:
        busy._session._exchange([Request(messages.Stats())], deadline_of(5.0))
        if not is_over.is_set():
            owner.post(work)

    owner.post(work)  # for two callers: when one's is done, the other one's is there already
    owner.post(work)
    end_ns = time.monotonic_ns() + 3_000_000_000
    try:
        until(lambda: not busy.is_connected or line.heartbeat > end_ns, "more than one lease is over, or its session")
    finally:
        is_over.set()
    assert busy.stats()["deaths"] == {"pidfd": 0, "ttl": 0}


def test_row_05_a_process_judges_its_lease_by_its_own_clock_even_if_nobody_else_does(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, owner: Peer
) -> None:
    """The coordinator is stopped meanwhile, so that the board goes on saying that the session lives."""
    fixtures.stop(coordinator.pid)
    try:
        assert owner.call(actions.hold_the_gil_and_record, "e", 1.5 * TTL_S) == "SessionExpired"
        assert owner.call(actions.errors_of_every_use, "e") == ALL_EXPIRED
    finally:
        fixtures.resume(coordinator.pid)
    until_lost(client, "ttl")  # it does not beat any more
    assert client.event("e", recorder=True).generation == 0


# --- row 16 -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def late_client() -> Iterator[ipcsync.Client]:
    """A client of a coordinator whose replies for names that begin with "late" come late."""
    with (
        fixtures.launch_patched("late-replies", fixtures.private_dir()) as coordinator,
        ipcsync.connect(coordinator.endpoint, name="late", lease_ttl=TTL_S) as client,
    ):
        yield client


def _open_too_late(client: ipcsync.Client, recorder: bool) -> None:
    """In less time than the reply takes; again if the request itself came so late that it was not decided."""
    decided = client.stats()["requests"].get("open", 0)
    while client.stats()["requests"].get("open", 0) == decided:
        with pytest.raises(ipcsync.WaitTimeout):
            client.event("late", recorder=recorder, timeout=patched.LATE_S / 3)


@pytest.mark.parametrize("recorder", [False, True])
def test_row_16_what_a_request_got_after_its_client_gave_up_is_released(
    late_client: ipcsync.Client, recorder: bool
) -> None:
    _open_too_late(late_client, recorder)
    stats = late_client.stats()  # answered after it
    assert stats["requests"]["open"] == 1
    until(lambda: late_client.stats()["requests"].get("close") == 1, "the close of what came late")
    assert late_client.list_events() == []
    assert late_client.stats()["pool_in_use"] == 0


def test_row_04_a_process_that_expires_and_dies_before_its_session_is_ready_leaves_no_session(
    new_coordinator: Callable[..., ipcsync.Coordinator], peer: Peer
) -> None:
    """It holds its lifeline, so its line is kept when the lease runs out; it has sent too little for its pidfd."""
    coordinator = new_coordinator(max_sessions=2)
    with ipcsync.connect(coordinator.endpoint, name="observer") as observer:
        peer.begin(actions.stop_in_connect, coordinator.endpoint, TTL_S)
        until_lost(observer, "ttl")
        with pytest.raises(ipcsync.QuotaExceeded):
            ipcsync.connect(coordinator.endpoint)
        peer.kill()
        until(lambda: _can_connect(coordinator.endpoint), "its line is free")


@pytest.mark.parametrize(
    ("at", "error"), [("before", "ConnectError"), ("before and behind", "SessionExpired")], ids=["once", "twice"]
)
def test_row_04_a_process_that_expires_before_its_session_is_ready_leaves_its_line_to_the_next_one(
    new_coordinator: Callable[..., ipcsync.Coordinator], new_peer: Callable[[], Peer], at: str, error: str
) -> None:
    """Whether that has the line already when it takes the lifeline, or is given it later: there is no other line."""
    coordinator, late, later = new_coordinator(max_sessions=2), new_peer(), new_peer()
    with ipcsync.connect(coordinator.endpoint, name="observer") as observer:
        board = observer._session.lease.board
        late.begin(actions.stop_in_connect, coordinator.endpoint, 0.2, at)
        until_lost(observer, "ttl")
        _until_stopped(late)
        if "behind" in at:
            fixtures.resume(late.pid)
            until(lambda: board.has_lifeline(board.session(1)), "it has the lifeline")
            _until_stopped(late)
        later.begin(actions.stop_in_connect, coordinator.endpoint, 30.0, "before")
        _until_stopped(later)
        fixtures.resume(late.pid)
        assert late.result() == error
        fixtures.resume(later.pid)
        assert later.result() == ""
        later.call(actions.open_event, "e", "timeline")
        point = observer.event("e").at(1)
        later.kill()
        assert observer.wait_over(point, timeout=DEADLINE_S), "its end is seen, though the late process lives"


def _until_stopped(peer: Peer) -> None:
    until(lambda: fixtures.state_of(peer.pid) == "T", "it has stopped")


def _can_connect(endpoint: str) -> bool:
    try:
        ipcsync.connect(endpoint).close()
    except ipcsync.QuotaExceeded:
        return False
    return True


@pytest.mark.parametrize("recorder", [False, True])
def test_row_16_what_came_late_is_kept_if_it_was_asked_for_again(late_client: ipcsync.Client, recorder: bool) -> None:
    _open_too_late(late_client, recorder)
    event = late_client.event("late", recorder=recorder)
    beats = late_client._session.lease._last_ns
    until(lambda: late_client._session.lease._last_ns > beats, "a heartbeat, which tells of what came late")
    late_client.stats()
    until(lambda: not late_client._session.attachments.has_closes, "nothing to tell")
    (info,) = late_client.list_events()
    assert (info.state, info.attached, info.recorder) == ("open", 1, "late" if recorder else "")
    if recorder:
        fixtures.finish(event.record())
    event.close()
    until(lambda: late_client.list_events() == [], "a beat may be looking at the event in the moment it is closed")


def test_row_16_a_role_that_came_late_goes_to_the_event_that_is_open_already(late_client: ipcsync.Client) -> None:
    late_client.event("other")
    first = late_client.event("late")
    _open_too_late(late_client, True)
    until(lambda: late_client._session.attachments.uses[_key(first)].engine.is_recorder, "the role")
    until(lambda: not late_client._session.attachments.has_closes, "nothing to tell")
    assert {info.name: info.recorder for info in late_client.list_events()} == {"late": "late", "other": ""}
    fixtures.finish(late_client.event("late", recorder=True).record())


def _key(event: ipcsync.SharedEvent) -> tuple[int, int]:
    return event._engine.slot, event._engine.incarnation


# --- row 18 -----------------------------------------------------------------------------------------------------------


def test_row_18_a_request_of_an_expired_session_is_refused_and_never_revives_it(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, new_client: Callable[..., ipcsync.Client]
) -> None:
    silent = new_client("silent", lease_ttl=TTL_S)
    event = silent.event("e", recorder=True)
    _ask(silent)
    beat = silent._session.owner._beat
    silent._session.owner._beat = lambda at_beat: TTL_S  # type: ignore[method-assign] # it says nothing
    until_lost(client, "ttl")
    for _ in range(3):
        silent._session.lease.line.heartbeat = time.monotonic_ns()
        with pytest.raises(ipcsync.SessionExpired):
            _ask(silent)
    with pytest.raises(ipcsync.SessionExpired):
        event.record()
    assert [info.name for info in client.list_sessions()] == ["main"]
    assert client.event("e", recorder=True).generation == 0  # the name is free
    silent._session.owner._beat = beat  # type: ignore[method-assign]


def _ask(client: ipcsync.Client) -> Any:
    return client._session.connection.request(messages.ListSessions(), client._session.token, 5.0)


# --- row 19 -----------------------------------------------------------------------------------------------------------


def test_row_19_an_invalid_ttl_is_refused(new_client: Callable[..., ipcsync.Client]) -> None:
    for wrong in (0, 0.0, -1.0, -math.inf, math.nan):
        with pytest.raises(ipcsync.ProtocolError) as caught:
            new_client(lease_ttl=wrong)
        assert caught.value.code == "ttl"
    assert [info.name for info in new_client("another").list_sessions()] == ["another"]


def test_row_19_a_ttl_is_clamped_and_the_granted_one_is_told(new_client: Callable[..., ipcsync.Client]) -> None:
    for asked, granted in ((1e300, 3600.0), (math.inf, 3600.0), (1e-300, 0.2), (7, 7.0)):
        assert new_client(lease_ttl=asked).lease_ttl == granted


def test_row_19_who_asks_for_no_ttl_gets_the_coordinators_default(
    new_coordinator: Callable[..., ipcsync.Coordinator],
) -> None:
    with ipcsync.connect(new_coordinator().endpoint) as client:
        assert client.lease_ttl == 5.0


def test_row_19_a_coordinator_refuses_an_invalid_default_ttl() -> None:
    for wrong in (0.0, -1.0, math.nan, 1e300, math.inf):
        with pytest.raises(config.ConfigError, match="lease_ttl"):
            config.load({"lease_ttl": wrong}, None)
    with pytest.raises(ipcsync.ConnectError, match="status 2"):
        ipcsync.launch(lease_ttl=math.nan)


def test_row_19_the_granted_ttl_is_the_one_that_holds(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, new_peer: Callable[[], Peer]
) -> None:
    patient, impatient = new_peer(), new_peer()
    patient.call(actions.connect, coordinator.endpoint, "patient", 1e300)
    impatient.call(actions.connect, coordinator.endpoint, "impatient", TTL_S)
    for each in (patient, impatient):
        fixtures.stop(each.pid)
    until_lost(client, "ttl")
    assert [info.name for info in client.list_sessions()] == ["main", "patient"]
    for each in (patient, impatient):
        fixtures.resume(each.pid)
    assert patient.call(actions.error_of, actions.stats) == ""
    assert impatient.call(actions.error_of, actions.stats) == "SessionExpired"


# --- row 53 -----------------------------------------------------------------------------------------------------------

_CONNECT = """
import ipcsync, sys
try:
    ipcsync.connect(sys.argv[1], timeout=20).close()
except ipcsync.ConnectError as error:
    sys.exit(f"{error.endpoint}: {error}")
"""
_UNSHARED = ["unshare", "--fork", "--kill-child", "--time", "--monotonic"]


def _no_time_namespace() -> str:
    """Why a process cannot be put into a time namespace here, empty if one can."""
    try:
        done = subprocess.run([*_UNSHARED, "100", "true"], capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return "there is no unshare(1) here"
    return "" if done.returncode == 0 else f"no new time namespace here: {done.stderr.strip()}"


@pytest.fixture
def time_namespaces() -> None:
    """Skips where a process cannot be put into one."""
    if reason := _no_time_namespace():
        pytest.skip(reason)


@pytest.mark.parametrize("seconds", [-100, 100_000], ids=["behind", "ahead"])
def test_row_53_a_process_with_another_clock_is_refused_and_told_why(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, seconds: int, time_namespaces: None
) -> None:
    command = [*_UNSHARED, str(seconds), sys.executable, "-c", _CONNECT, coordinator.endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{coordinator.endpoint}: ")
    assert "two time namespaces" in done.stderr
    assert [row.name for row in client.list_sessions()] == ["main"], "no lease, and so none that lasts for ever"


@pytest.mark.process
def test_row_53_processes_that_share_a_clock_of_their_own_are_served(time_namespaces: None) -> None:
    program = "import ipcsync\nwith ipcsync.launch() as c:\n    ipcsync.connect(c.endpoint).close()\n"
    command = [*_UNSHARED, "100000", sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).returncode == 0
