"""Rows 54 to 60: a coordinator with a keeper dies, hangs, or is replaced, and nobody's session ends."""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync._board import BROKEN, CLOSED, INT64_MAX
from ipcsync._board.runtime_dir import OUTCOME, RELOAD, Outcome, read_outcome
from ipcsync._launch import Coordinator
from ipcsync.typing import EngineName
from tests.faults import chain_actions as do
from tests.faults import figures, fixtures, restart_figures, restart_storm
from tests.faults.chain_line import Line, NewPeer
from tests.faults.fixtures import Blocked, has_ended, state_of
from tests.kit.descriptors import descriptors
from tests.kit.examples import LONG
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until
from tests.kit.zygote import EXEC, IPCSYNC, children_of

pytestmark = [pytest.mark.keeper, pytest.mark.own_coordinator, pytest.mark.process]
_ENGINES = pytest.mark.parametrize("engine", fixtures.ENGINES)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What coordinators do when they start, or as soon as it stands there: see `tests.faults.dying`."""
    path = tmp_path / "script"
    monkeypatch.setenv("IPCSYNC_TEST_SCRIPT", str(path))
    return path


@pytest.fixture
def by_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process is started as users start it."""
    for name, value in EXEC.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def kept(script: Path) -> Iterator[Coordinator]:
    """A coordinator with a keeper, which follows the script."""
    with fixtures.launch_patched("scripted", fixtures.private_dir(), "--keeper") as one:
        yield one


@pytest.fixture
def client(kept: Coordinator) -> Iterator[ipcsync.Client]:
    with _connect(kept.endpoint, "client") as one:
        yield one


def _connect(endpoint: str, name: str) -> ipcsync.Client:
    """A client that waits for as long as a busy machine may take to start another coordinator."""
    one = ipcsync.connect(endpoint, name=name, timeout=DEADLINE_S)
    one.timeout = DEADLINE_S
    return one


def _pid(client: ipcsync.Client) -> int:
    return int(client.stats()["pid"])


def _kill(client: ipcsync.Client) -> int:
    """Kill the coordinator that serves, and return its pid."""
    pid = _pid(client)
    os.kill(pid, signal.SIGKILL)
    return pid


@contextmanager
def _dying(client: ipcsync.Client) -> Iterator[None]:
    """What is done inside, the coordinator that serves does not see, and the next one finds."""
    pid = _pid(client)
    fixtures.stop(pid)
    yield
    os.kill(pid, signal.SIGKILL)


@contextmanager
def _no_other_can_be_started(kept: Coordinator) -> Iterator[None]:
    """The keeper has no descriptor to start another coordinator with."""
    limits = resource.prlimit(kept.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(kept.pid, resource.RLIMIT_NOFILE, (8, limits[1]))
    yield
    resource.prlimit(kept.pid, resource.RLIMIT_NOFILE, limits)


# --- row 54 -----------------------------------------------------------------------------------------------------------


def test_row_54_an_idle_coordinators_death_ends_nothing(kept: Coordinator, client: ipcsync.Client) -> None:
    with client.event("held", recorder=True) as event:
        first = event.record()
        first.synchronize(timeout=DEADLINE_S)
        for starts in (2, 3):
            _kill(client)
            assert first.query()
            event.record().synchronize(timeout=DEADLINE_S)
            stats = client.stats()
            assert (stats["starts"], stats["keeper_pid"], stats["events"]) == (starts, kept.pid, 1)
            assert [info.name for info in client.list_events()] == ["held"]
        assert [info.name for info in client.list_sessions()] == ["client"]
    assert client.stats()["events"] == 0


@_ENGINES
def test_row_54_calls_that_are_blocked_in_every_way_go_on(client: ipcsync.Client, engine: EngineName) -> None:
    with _connect(client.endpoint, "other") as other:
        event = client.event("one", recorder=True, engine=engine, depth=1)
        seen = other.event("one", engine=engine)
        wait = Blocked(lambda: seen.at(1).wait(timeout=DEADLINE_S))
        synchronize = Blocked(lambda: seen.at(1).synchronize(timeout=DEADLINE_S))
        died = _kill(client)
        request = Blocked(lambda: other.event("two"), "_call")
        until(lambda: has_ended(died), "the coordinator is dead")
        event.record().synchronize(timeout=DEADLINE_S)
        assert wait.outcome() is None
        assert synchronize.outcome() is None
        opened = request.outcome()
        assert isinstance(opened, ipcsync.SharedEvent)
        opened.close()
        assert client.stats()["sessions"] == 2


def test_row_54_who_watches_is_told_of_the_restart_and_misses_no_change(client: ipcsync.Client) -> None:
    notices: list[tuple[str, str]] = []

    def watch() -> None:
        for notice in client.watch(timeout=DEADLINE_S):
            notices.append((notice.kind, notice.name))
            if notice.name == "last":
                return

    with _connect(client.endpoint, "other") as other:
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        until(lambda: notices, "the first snapshot")
        with other.event("before"):
            until(lambda: ("opened", "before") in notices, "the first change")
            _kill(other)
            with other.event("after"), other.event("last"):
                thread.join(DEADLINE_S)
                assert not thread.is_alive()
    kinds = [kind for kind, _ in notices]
    assert kinds.count("coordinator_restarted") == 1
    assert notices.count(("opened", "before")) == 1, "no change twice"
    assert notices.count(("opened", "after")) == 1
    assert kinds.count("session_closed") == 0


def test_row_54_somebody_who_kills_one_after_the_other_ends_nothing(kept: Coordinator, client: ipcsync.Client) -> None:
    """SIGKILL is somebody else's doing: that nothing was answered meanwhile is no reason to give up."""
    with client.event("held", recorder=True) as event:
        for _ in range(5):
            starts = client._session.lease.board.starts
            (pid,) = children_of(kept.pid)
            os.kill(pid, signal.SIGKILL)
            until(lambda: client._session.lease.board.starts > starts, "the next one serves")  # noqa: B023 - at once
        event.record().synchronize(timeout=DEADLINE_S)
        stats = client.stats()
    assert stats["starts"] == 6
    assert stats["restarts"] == {"died": 5, "hung": 0, "reloaded": 0}
    assert stats["pause_s"] > 0


def test_row_54_without_a_descriptor_to_start_another_with_the_keeper_waits_until_there_is_one(
    kept: Coordinator, client: ipcsync.Client
) -> None:
    pid = _pid(client)
    with _no_other_can_be_started(kept):
        os.kill(pid, signal.SIGKILL)
        until(lambda: has_ended(pid), "the coordinator is dead")
        with pytest.raises(ipcsync.WaitTimeout):
            client.stats(timeout=1.0)
        assert kept.is_running
    assert client.stats()["starts"] == 2


@pytest.mark.parametrize("when", ["before", "at once"])
def test_row_54_a_spare_that_dies_counts_for_nothing(script: Path, when: str) -> None:
    with (
        fixtures.launch_patched("scripted", fixtures.private_dir(), "--keeper", "--spare") as kept,
        _connect(kept.endpoint, "client") as client,
        client.event("held", recorder=True) as event,
    ):
        pid = _pid(client)
        (spare,) = until(lambda: set(children_of(kept.pid)) - {pid}, "a spare")
        if when == "at once":  # the keeper sees both deaths when it goes on
            os.kill(kept.pid, signal.SIGSTOP)
            until(lambda: state_of(kept.pid) == "T", "the keeper has stopped")
        os.kill(spare, signal.SIGKILL)
        until(lambda: has_ended(spare), "the spare is dead")
        os.kill(pid, signal.SIGKILL)
        until(lambda: has_ended(pid), "the coordinator is dead")
        os.kill(kept.pid, signal.SIGCONT)
        event.record().synchronize(timeout=DEADLINE_S)
        stats = client.stats()
        assert (stats["starts"], stats["restarts"]["died"], stats["events"]) == (2, 1, 1)


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_row_54_a_storm_of_deaths_stops_and_reloads_is_not_noticed(seed: int) -> None:
    assert restart_storm.weather(40.0, seed)["turns"] > 0


def test_row_54_a_board_without_its_name_is_gone_on_with(kept: Coordinator, client: ipcsync.Client) -> None:
    event = client.event("held", recorder=True)
    os.unlink(client._session.lease.board.path)  # as at a logout, where the system cleans up behind users
    _kill(client)
    event.record().synchronize(timeout=DEADLINE_S)
    assert client.stats()["starts"] == 2
    assert _reload(kept).returncode == 0
    client.event("another", recorder=True).record().synchronize(timeout=DEADLINE_S)


# --- row 55 -----------------------------------------------------------------------------------------------------------


class _Requests:
    """The requests that change something, each as (before, the request, what must be true of its outcome, after)."""

    def __init__(self, client: ipcsync.Client) -> None:
        self.client = client
        self.other = _connect(client.endpoint, "other")
        self.count = 0

    def create(self) -> None:
        self.count += 1
        with self.client.event(f"new-{self.count}", recorder=True) as event:
            event.record().synchronize(timeout=DEADLINE_S)
            assert event.generation == 1

    def join_and_leave(self) -> None:
        with self.client.event("shared", recorder=True) as event, self.other.event("shared") as seen:
            event.record()
            seen.at(1).synchronize(timeout=DEADLINE_S)

    def attach_by_a_point(self) -> None:
        with self.client.event("pointed at", recorder=True) as event:
            self.other.point(bytes(event.record())).wait(timeout=DEADLINE_S)
        ipcsync.ipc_collect()
        table = self.other._session.attachments
        until(lambda: not (table.ending or table.has_closes), "what it was attached to is given back")

    def name_a_stream(self) -> None:
        self.count += 1
        assert self.client.stream(f"stream-{self.count}", priority=-1) is not None

    def connect_and_say_goodbye(self) -> None:
        with _connect(self.client.endpoint, "guest") as guest:
            guest.event("of a guest", recorder=True).record()

    def die(self) -> None:
        peer = Peer()
        try:
            peer.call(_hold, self.client.endpoint)
        finally:
            peer.kill()
        until(lambda: self.names() == ["client", "other"], "the death is seen")

    def names(self) -> list[str]:
        return sorted(info.name for info in self.client.list_sessions())


_held: list[Any] = []


def _hold(endpoint: str) -> None:
    client = _connect(endpoint, "dies")
    event = client.event("of the dead", recorder=True)
    event.record()
    _held.extend([client, event])


@pytest.mark.parametrize(
    "what", ["create", "join_and_leave", "attach_by_a_point", "name_a_stream", "connect_and_say_goodbye", "die"]
)
def test_row_55_killed_at_every_step_of_what_changes_something(client: ipcsync.Client, script: Path, what: str) -> None:
    requests = _Requests(client)
    act: Callable[[], None] = getattr(requests, what)
    act()
    sessions = requests.names()
    deaths, every = 0, 1 if LONG else 3
    for step in range(random.randint(1, every), 200, every):
        script.write_text(f"die {step}")
        act()
        survived = script.read_text() != ""
        script.write_text("")
        until(lambda: requests.names() == sessions, "as many sessions as before")
        until(lambda: client.list_events() == [], "no event is left")
        stats = client.stats()
        assert (stats["sessions"], stats["pool_in_use"], stats["quarantined"]) == (len(sessions), 0, 0)
        if survived:
            break
        deaths += 1
    assert survived
    assert stats["starts"] == 1 + deaths, "each of the steps killed once"
    requests.other.close()


def test_row_55_what_was_given_up_and_done_by_one_that_died_is_let_go_of(
    kept: Coordinator, client: ipcsync.Client, script: Path
) -> None:
    client.stats()
    script.write_text("die 2")  # behind the record, before what follows from it
    with _no_other_can_be_started(kept), pytest.raises(ipcsync.WaitTimeout):
        client.event("given up", timeout=2.0)  # in which it is sent, on a busy machine too
    until(lambda: client.stats()["starts"] == 2, "another coordinator")
    until(lambda: client.list_attachments() == [], "nothing is attached")
    assert client.stats()["pool_in_use"] == 0


@pytest.mark.parametrize(("name", "deaths"), [("poison", 2), ("out of memory", 4)])
def test_row_55_a_request_that_coordinators_die_of_is_refused(client: ipcsync.Client, name: str, deaths: int) -> None:
    with client.event("other", recorder=True) as event:
        with pytest.raises(ipcsync.ProtocolError) as caught:
            client.event(name, timeout=DEADLINE_S)
        assert caught.value.code == "poison"
        assert client.stats()["starts"] == 1 + deaths
        event.record().synchronize(timeout=DEADLINE_S)


@pytest.mark.parametrize("step", [4, pytest.param(5, marks=pytest.mark.thorough)])
def test_row_55_a_connect_that_waits_for_a_coordinator_longer_than_its_ttl_succeeds(
    kept: Coordinator, client: ipcsync.Client, script: Path, step: int
) -> None:
    pid = _pid(client)
    script.write_text(f"die {step}")
    with _no_other_can_be_started(kept):
        connect = Blocked(lambda: ipcsync.connect(kept.endpoint, lease_ttl=2.0, timeout=DEADLINE_S), "wait")
        until(lambda: has_ended(pid), "the coordinator dies of it")
        died = time.monotonic()
        until(lambda: time.monotonic() > died + 2.5, "the TTL is over")
    guest = connect.outcome()
    assert isinstance(guest, ipcsync.Client)
    with guest.event("of a guest", recorder=True) as event:
        event.record().synchronize(timeout=DEADLINE_S)
    guest.close()


# --- row 56 -----------------------------------------------------------------------------------------------------------


@_ENGINES
def test_row_56_a_recorder_that_dies_while_there_is_no_coordinator(client: ipcsync.Client, engine: EngineName) -> None:
    peer = Peer()
    try:
        pid = peer.call(_record_forever, client.endpoint, engine)
        seen = client.event("theirs", engine=engine)
        seen.at(1).synchronize(timeout=DEADLINE_S)
        blocked = Blocked(lambda: seen.at(99).wait(timeout=DEADLINE_S))
        coordinator = _pid(client)
        fixtures.stop(coordinator)  # first, so that it sees nothing of the other death
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        assert isinstance(blocked.outcome(), ipcsync.RecorderLost)
        assert time.monotonic() - began < DEADLINE_S / 2
        os.kill(coordinator, signal.SIGKILL)
        until(lambda: seen.state == "broken", "the new coordinator breaks it")
    finally:
        peer.kill()
    assert [info.name for info in client.list_sessions()] == ["client"]
    with client.event("theirs", recorder=True, engine=engine) as anew:
        anew.record().synchronize(timeout=DEADLINE_S)
    seen.close()
    until(lambda: client.stats()["pool_in_use"] == 0, "the dead process is gone")


@_ENGINES
def test_row_56_a_program_that_ends_while_there_is_no_coordinator_has_closed(
    client: ipcsync.Client, engine: EngineName
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _ENDS_WITHOUT_CLOSE, client.endpoint, engine], stdin=subprocess.PIPE
    ) as program:
        until(client.list_events, "it has opened its event")
        seen = client.event("theirs", engine=engine)
        seen.at(1).synchronize(timeout=DEADLINE_S)
        with _dying(client):
            program.communicate(b"\n", timeout=DEADLINE_S)
            assert program.returncode == 0
    until(lambda: seen.state != "open", "the new coordinator finds that it ended")
    assert seen.state == "closed"
    assert seen.at(1).query()
    seen.close()
    assert [info.name for info in client.list_sessions()] == ["client"]
    assert client.stats()["deaths"] == {"pidfd": 0, "ttl": 0}
    assert client.stats()["pool_in_use"] == 0


_ENDS_WITHOUT_CLOSE = """
import sys, ipcsync
client = ipcsync.connect(sys.argv[1], name="theirs", timeout=20.0)
event = client.event("theirs", recorder=True, engine=sys.argv[2])
event.record().synchronize(20)
sys.stdin.readline()
"""


def _record_forever(endpoint: str, engine: EngineName) -> int:
    client = _connect(endpoint, "theirs")
    event = client.event("theirs", recorder=True, engine=engine)
    event.record()
    _held.extend([client, event])
    return os.getpid()


def test_row_56_a_waiter_that_dies_while_there_is_no_coordinator_is_let_go_of(client: ipcsync.Client) -> None:
    with client.event("ours", recorder=True) as event:
        event.record()
        peer = Peer()
        peer.call(_attach, client.endpoint)
        coordinator = _pid(client)
        fixtures.stop(coordinator)
        peer.kill()
        os.kill(coordinator, signal.SIGKILL)
        until(lambda: [info.name for info in client.list_sessions()] == ["client"], "the death is seen")
        until(lambda: [info.attached for info in client.list_events()] == [1], "its process is gone")


def _attach(endpoint: str) -> None:
    client = _connect(endpoint, "waiter")
    _held.extend([client, client.event("ours")])


# --- row 57 -----------------------------------------------------------------------------------------------------------


def _begin_reload(kept: Coordinator) -> subprocess.Popen[str]:
    command = [*IPCSYNC, "reload", "--runtime-dir", kept.runtime_dir]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _reload(kept: Coordinator) -> subprocess.CompletedProcess[str]:
    process = _begin_reload(kept)
    out, errors = process.communicate(timeout=2 * DEADLINE_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def test_row_57_upgrades_under_load_are_not_noticed(kept: Coordinator, client: ipcsync.Client) -> None:
    done = threading.Event()
    failures: list[BaseException] = []
    rounds = [0]

    def work() -> None:
        try:
            while not done.is_set():
                with client.event("worked on", recorder=True) as event:
                    event.record().synchronize(timeout=DEADLINE_S)
                rounds[0] += 1
        except BaseException as error:  # noqa: BLE001 - looked at below
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        pids = {_pid(client)}
        for _ in range(3):
            before = rounds[0]
            outcome = _reload(kept)
            assert (outcome.returncode, outcome.stdout) == (0, "reloaded\n"), outcome.stderr
            pids.add(_pid(client))
            until(lambda: rounds[0] > before + 1, "the work goes on")  # noqa: B023 - called at once
    finally:
        done.set()
        thread.join()
    assert failures == []
    assert len(pids) == 4
    assert client.stats()["sessions"] == 1


def test_row_57_an_upgrade_in_the_middle_of_a_request_for_events_is_not_noticed(
    kept: Coordinator, client: ipcsync.Client, script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The old coordinator ends without an answer and without a trace of what it began; the new one does the request."""
    script.write_text("dismissed")
    opened = Blocked(lambda: client.event("a long ring", recorder=True, engine="event", depth=1024), "event")
    until(lambda: script.read_text() == "", "the coordinator is about to make events")
    assert _reload(kept).returncode == 0
    event = opened.outcome()
    assert isinstance(event, ipcsync.SharedEvent), event
    event.record().synchronize(timeout=DEADLINE_S)
    assert (client.stats()["starts"], client.stats()["events"]) == (2, 1)
    assert "request failed" not in capfd.readouterr().err, "its answer may not have come out, and is wrong either way"


def test_row_57_upgrades_in_the_middle_of_one_request_are_no_deaths_of_it(
    kept: Coordinator, client: ipcsync.Client, script: Path
) -> None:
    script.write_text("dismissed")
    opened = Blocked(lambda: client.event("a long ring", recorder=True, engine="event", depth=1024), "event")
    for number in range(3):
        until(lambda: script.read_text() == "", "the coordinator is about to make events")
        if number < 2:
            script.write_text("dismissed")  # for the next one, too
        assert _reload(kept).returncode == 0
    assert isinstance(opened.outcome(), ipcsync.SharedEvent)


def test_row_57_an_outcome_of_an_earlier_keeper_says_nothing_and_goes_with_it(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    later_ns = time.monotonic_ns() + 10**15  # as before the machine was started anew
    (directory / OUTCOME).write_text(json.dumps({"began_ns": later_ns, "why_not": ""}))
    with ipcsync.launch(keeper=True, runtime_dir=str(directory)) as one:
        assert read_outcome(str(directory)) == Outcome()
        assert _reload(one).returncode == 0
        assert read_outcome(str(directory)).began_ns > 0
    assert os.listdir(directory) == []


def test_row_57_two_reloads_at_once_are_both_done(by_exec: None, kept: Coordinator, client: ipcsync.Client) -> None:
    with client.event("held", recorder=True) as event:
        begun = [_begin_reload(kept) for _ in range(2)]
        said = [process.communicate(timeout=2 * DEADLINE_S)[0] for process in begun]
        assert said == ["reloaded\n"] * 2
        assert client.stats()["restarts"]["reloaded"] in (1, 2), "asked for at once, they may be one"
        event.record().synchronize(timeout=DEADLINE_S)


def test_row_57_an_outcome_that_cannot_be_told_ends_nothing(kept: Coordinator, client: ipcsync.Client) -> None:
    """The keeper logs it, and the command has to give up waiting."""
    path = Path(kept.runtime_dir, f"{OUTCOME}.new")
    path.unlink()
    path.mkdir()
    os.kill(kept.pid, RELOAD)
    until(lambda: client.stats()["starts"] == 2, "the new one")
    path.rmdir()
    assert _reload(kept).returncode == 0
    assert client.stats()["restarts"]["reloaded"] == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file system")
def test_row_57_reloads_say_what_came_of_them_where_the_file_system_is_full(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(directory), b"tmpfs", 0, b"size=32m,mode=0700") != 0:
        pytest.skip(f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        with ipcsync.launch(keeper=True, runtime_dir=str(directory)) as one:
            with open(directory / "fill", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(directory).free)
            assert not shutil.disk_usage(directory).free
            for _ in range(3):
                assert _reload(one).stdout == "reloaded\n"
    finally:
        assert libc.umount2(bytes(directory), 2) == 0  # MNT_DETACH


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_row_57_a_hundred_upgrades_under_load_meet_no_error() -> None:
    restart_figures.upgrades(100, figures.Figures())


@pytest.mark.parametrize(
    ("words", "why"),
    [("version", "another version of: journal"), ("crash", "status 7"), ("noise", "killed by SIGKILL")],
)
def test_row_57_code_that_does_not_fit_is_refused_and_the_old_one_goes_on(
    kept: Coordinator, client: ipcsync.Client, script: Path, words: str, why: str
) -> None:
    pid = _pid(client)
    script.write_text(words)
    outcome = _reload(kept)
    script.write_text("")
    assert outcome.returncode == 1
    assert why in outcome.stderr
    assert _pid(client) == pid
    with client.event("works", recorder=True) as event:
        event.record()
    assert _reload(kept).returncode == 0
    assert _pid(client) != pid


def test_row_57_a_death_after_which_only_code_that_does_not_fit_is_there_is_the_end(
    kept: Coordinator, client: ipcsync.Client, script: Path
) -> None:
    event = client.event("held", recorder=True)
    pid = _pid(client)
    script.write_text("version")
    os.kill(pid, signal.SIGKILL)
    _assert_given_up(kept, client, event)


@pytest.mark.parametrize("why", ["crash", "short"])
def test_row_57_a_death_while_the_code_does_not_load_or_has_no_room_ends_nothing(
    kept: Coordinator, client: ipcsync.Client, script: Path, why: str
) -> None:
    event = client.event("held", recorder=True)
    pid = _pid(client)
    script.write_text(why)
    os.kill(pid, signal.SIGKILL)
    crashes = script.with_name("crashes")
    until(lambda: crashes.exists() and len(crashes.read_text()) >= 5, "five have ended at their start")
    script.write_text("")
    event.record().synchronize(timeout=DEADLINE_S)
    greeted = len(crashes.read_text()) if why == "short" else 0
    stats = client.stats(timeout=DEADLINE_S)
    assert stats["starts"] == 2 + greeted, "the next one serves"
    assert stats["restarts"]["died"] == 1 + greeted, "one for each start that followed"


def test_row_57_without_a_keeper_a_reload_is_refused_and_harms_nobody() -> None:
    with ipcsync.launch(keeper=False) as alone, ipcsync.connect(alone.endpoint) as client:
        outcome = _reload(alone)
        assert outcome.returncode == 1
        assert "has no keeper" in outcome.stderr
        assert client.stats()["keeper_pid"] == alone.pid


# --- row 58 -----------------------------------------------------------------------------------------------------------


def _assert_given_up(kept: Coordinator, client: ipcsync.Client, event: ipcsync.SharedEvent) -> None:
    until(lambda: not kept.is_running, "the keeper has given up")
    with pytest.raises(ipcsync.CoordinatorLost):
        event.record()
    with pytest.raises(ipcsync.CoordinatorLost):
        client.stats()
    assert stat.S_IMODE(os.stat(os.path.join(kept.runtime_dir, "journal")).st_mode) == 0o600
    assert kept.stop() == 1


def test_row_58_a_journal_that_cannot_be_read_is_kept_and_everyone_is_told(
    kept: Coordinator, client: ipcsync.Client
) -> None:
    event = client.event("held", recorder=True)
    pid = _pid(client)
    (log,) = [fd for fd, path in descriptors(kept.pid).items() if "ipcsync-journal-0" in path]
    with open(f"/proc/{kept.pid}/fd/{log}", "r+b") as file:
        file.seek(20)
        file.write(b"\xff\xff\xff\xff")
    os.kill(pid, signal.SIGKILL)
    _assert_given_up(kept, client, event)


def test_row_58_behind_a_use_that_the_board_has_otherwise_nothing_passes(
    kept: Coordinator, client: ipcsync.Client, new_peer: NewPeer
) -> None:
    """The new coordinator breaks it, and so releases its waiters; its recorder lives."""
    line = Line(kept.endpoint, new_peer, "timeline")
    point = line.follow("b", line.begin())
    waiter = line.add("c", records=False)
    slot = client.event("a/out")._engine.line
    with _dying(client):
        slot.finish(CLOSED)
    line.assert_lost(waiter.call(do.await_end, point), line.peers["a"].pid, DEADLINE_S)


def test_row_58_a_free_slot_that_the_board_has_otherwise_lets_no_later_wait_pass(
    new_coordinator: Callable[..., Coordinator],
) -> None:
    with _connect(new_coordinator(keeper=True, pool=1).endpoint, "client") as client:  # so that the slot is used again
        _use_a_free_slot_again(client)


def _use_a_free_slot_again(client: ipcsync.Client) -> None:
    with client.event("one", recorder=True, engine="timeline") as event:
        event.record().synchronize(DEADLINE_S)
        slot = event._engine.line
    until(lambda: client.stats()["pool_in_use"] == 0, "the slot is free")
    with _dying(client):
        slot.finish(BROKEN)
        slot.store_completed(INT64_MAX)
    with client.event("two", recorder=True, engine="timeline") as event:
        assert event._engine.line.address == slot.address
        stream = ipcsync.Stream()
        event._engine.wait(1, stream, None, True)
        assert not stream.query()
        event.record(ipcsync.Stream())
        stream.synchronize()


def test_row_58_a_coordinator_that_dies_again_and_again_is_given_up(
    kept: Coordinator, client: ipcsync.Client, script: Path
) -> None:
    event = client.event("held", recorder=True)
    pid = _pid(client)
    script.write_text("unread")
    os.kill(pid, signal.SIGKILL)
    _assert_given_up(kept, client, event)


# --- row 59 -----------------------------------------------------------------------------------------------------------


def test_row_59_the_keepers_death_is_the_coordinators(kept: Coordinator, client: ipcsync.Client) -> None:
    pid = _pid(client)
    event = client.event("held", recorder=True)
    blocked = Blocked(lambda: event.at(5).wait(timeout=DEADLINE_S))
    os.kill(kept.pid, signal.SIGKILL)
    began = time.monotonic()
    assert isinstance(blocked.outcome(), ipcsync.CoordinatorLost)
    assert time.monotonic() - began < DEADLINE_S / 2
    until(lambda: has_ended(pid), "the coordinator has ended too")
    with pytest.raises(ipcsync.CoordinatorLost):
        client.event("more")


def test_row_59_with_its_keeper_stopped_all_but_new_events_goes_on(kept: Coordinator, client: ipcsync.Client) -> None:
    event = client.event("held", recorder=True, engine="event")
    with client.event("the first", recorder=True, engine="event"):
        until(lambda: client.stats()["cuda_events"] >= 64, "events have been made to spare")
    os.kill(kept.pid, signal.SIGSTOP)  # it alone, and not its coordinator
    until(lambda: state_of(kept.pid) == "T", "the keeper has stopped")
    try:
        event.record().synchronize(timeout=DEADLINE_S)
        with client.event("from what was spare", recorder=True, engine="event") as more:
            more.record()
        assert client.stats()["sessions"] == 1
    finally:
        os.kill(kept.pid, signal.SIGCONT)
    assert client.stats()["starts"] == 1


def test_row_59_sigterm_ends_both_in_order(kept: Coordinator, client: ipcsync.Client) -> None:
    pid = _pid(client)
    began = time.monotonic()
    assert kept.stop(timeout=DEADLINE_S) == 0
    assert time.monotonic() - began < DEADLINE_S / 2
    assert has_ended(pid)
    with pytest.raises(ipcsync.CoordinatorLost, match="stopped"):
        client.stats()
    assert not os.path.exists(kept.endpoint.removeprefix("ipc://"))


# --- row 60 -----------------------------------------------------------------------------------------------------------


def test_row_60_a_coordinator_that_hangs_is_replaced(client: ipcsync.Client) -> None:
    event = client.event("held", recorder=True)
    pid = _pid(client)
    fixtures.stop(pid)
    event.record().synchronize(timeout=DEADLINE_S)
    stats = client.stats(timeout=2 * DEADLINE_S)
    assert stats["starts"] == 2
    assert has_ended(pid), "what was stopped does not go on"
    assert event.state == "open"
