"""What a client's close means, for its own calls and threads and for others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync._linux.futex import DeathMark
from ipcsync._native import pinned
from ipcsync._session import session as session_module
from ipcsync._session.attachments import MANY_POINTS
from ipcsync._session.connection import Connection, Request
from ipcsync._session.session import Session
from ipcsync._wire.messages import Close
from ipcsync.client import client as client_module
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults.fixtures import Blocked
from tests.graphs.layers import captured
from tests.kit.descriptors import none_left
from tests.kit.peer import Peer
from tests.kit.scripts import run
from tests.kit.until import DEADLINE_S, until

pytestmark = pytest.mark.driver

NewClient = Callable[..., ipcsync.Client]

_draining: list[Any] = []


def test_after_close_every_method_raises_client_closed(new_client: NewClient) -> None:
    client = new_client()
    data = bytes(client.record(ipcsync.Stream()))
    client.close()
    client.close()
    uses: list[Callable[[], object]] = [
        lambda: client.event("e"),
        client.record,
        lambda: client.point(data),
        lambda: client.stream("s"),
        client.list_events,
        client.list_sessions,
        client.stats,
        client.check,
        client.watch,
    ]
    for use in uses:
        with pytest.raises(ipcsync.ClientClosed):
            use()


def _replay(client: ipcsync.Client, _event: ipcsync.SharedEvent, point: ipcsync.Point) -> None:
    stream, wait = ipcsync.Stream(), ipcsync.GraphWait()
    captured(stream, lambda: wait.capture(stream))
    with client.replay({wait: point}, stream=stream):
        pass


def _reserved(client: ipcsync.Client, _event: ipcsync.SharedEvent, point: ipcsync.Point) -> None:
    client.reserve().record(after=[point])


@pytest.mark.parametrize(
    "call",
    [
        _replay,
        _reserved,
        lambda _client, event, point: event.record(after=[point]),
        lambda client, _event, point: client.record(after=[point]),
        lambda client, _event, point: client.record_all(after=[point]),
    ],
    ids=["replay", "reservation", "event", "client", "record_all"],
)
def test_a_close_ends_a_call_that_waits_for_another_clients_point_to_be_recorded(
    new_client: NewClient,
    engine: EngineName,
    call: Callable[[ipcsync.Client, ipcsync.SharedEvent, ipcsync.Point], object],
) -> None:
    client, other = new_client(), new_client()
    event, point = client.event("e", recorder=True, engine=engine), other.event("other", engine=engine).at(1)
    waiting = Blocked(lambda: call(client, event, point))
    client.close()
    try:
        assert isinstance(waiting.outcome(), ipcsync.EventClosed | ipcsync.ClientClosed)
    finally:
        other.close()  # else the thread, and what it waits for, would stay


def test_after_close_its_events_and_points_raise_event_closed(new_client: NewClient, engine: EngineName) -> None:
    client = new_client()
    event = client.event("e", recorder=True, engine=engine)
    stream = ipcsync.Stream()
    points = [event.record(stream), event.at(7), client.record(stream)]
    points[0].synchronize(10)
    client.close()
    uses: list[Callable[[], object]] = [lambda: event.record(stream), lambda: event.at(1), lambda: event.generation]
    for point in points:
        uses += [point.query, lambda point=point: point.synchronize(5), lambda point=point: point.wait(stream)]  # type: ignore[misc] # bound now
    for use in uses:
        with pytest.raises(ipcsync.EventClosed):
            use()
    event.close()
    assert event.state == "closed"


def test_the_same_holds_while_work_of_a_closed_client_is_still_unfinished(
    new_client: NewClient, engine: EngineName
) -> None:
    client, other = new_client(), new_client()
    event = client.event("e", recorder=True, engine=engine)
    seen = other.event("e")
    stream = ipcsync.Stream()
    with StreamGate(stream):
        point = event.record(stream)
        client.close()
        for use in (point.query, point.synchronize, lambda: event.at(2)):
            with pytest.raises(ipcsync.EventClosed):
                use()
        with pytest.raises(ipcsync.ClientClosed):
            client.stats()
        assert seen.state == "closed"
        assert not seen.at(1).query()
        with pytest.raises(ipcsync.RecorderLost):
            seen.at(2).query()
    seen.at(1).synchronize(10)
    seen.close()
    until(lambda: other.stats()["quarantined"] == 0, "what was left is let go of")
    assert len(other.list_sessions()) == 1


def test_a_close_wakes_the_clients_own_waits(new_client: NewClient, engine: EngineName) -> None:
    client, other = new_client(), new_client()
    recording = other.event("e", recorder=True, engine=engine)
    event = client.event("e")
    errors: list[BaseException] = []
    started = threading.Barrier(4)

    def wait(use: Callable[[], object]) -> None:
        started.wait(10)
        try:
            use()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    stream = ipcsync.Stream()
    with StreamGate(stream):
        recording.record(stream)
        uses = [event.at(1).synchronize, event.at(2).synchronize, lambda: event.at(2).wait(ipcsync.Stream())]
        threads = [threading.Thread(target=wait, args=[use]) for use in uses]
        for thread in threads:
            thread.start()
        started.wait(10)
        client.close()
        for thread in threads:
            thread.join(15)
    assert [type(error) for error in errors] == [ipcsync.EventClosed] * 3


def test_closing_finishes_what_it_recorded_and_frees_its_names(new_client: NewClient, engine: EngineName) -> None:
    client, other = new_client(), new_client()
    client.event("mine", recorder=True, engine=engine)
    client.event("theirs", engine=engine)
    waiting, kept = other.event("mine"), other.event("theirs")
    client.close()
    assert (waiting.state, kept.state) == ("closed", "open")
    with pytest.raises(ipcsync.RecorderLost):
        waiting.at(1).query()
    other.event("mine", recorder=True).close()
    assert [row.name for row in other.list_sessions()] == [other.name]


def test_a_close_does_not_wait_for_the_driver_to_unregister_the_boards_pages(
    new_client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a driver may let stand still behind any stream of the process."""
    client, is_inside, may_end = new_client(), threading.Event(), threading.Event()
    client.event("e", recorder=True, engine="timeline").record(ipcsync.Stream()).synchronize(10)
    monkeypatch.setattr("ipcsync._session.session._CALL_S", 4 * DEADLINE_S)

    def stand(*_: object) -> bool:
        is_inside.set()
        return not may_end.wait(5 * DEADLINE_S)

    monkeypatch.setattr(pinned, "unpin", stand)
    began = time.monotonic()
    try:
        client.close()
        assert is_inside.wait(DEADLINE_S)
        assert time.monotonic() - began < 2 * DEADLINE_S
    finally:
        may_end.set()


def test_a_close_that_nobody_waits_for_is_told_though_the_driver_keeps_the_sessions_thread(
    new_client: NewClient, engine: EngineName, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, other = new_client(), new_client()
    event, seen, session = client.event("e", recorder=True, engine=engine), other.event("e"), client._session
    is_inside, may_end = threading.Event(), threading.Event()

    def stand() -> bool:
        is_inside.set()
        return not may_end.wait(5 * DEADLINE_S)

    monkeypatch.setattr(session.driving, "look", stand)
    session.driving.wake()
    try:
        assert is_inside.wait(DEADLINE_S)
        session.abandon([event._attached])  # as a finalizer does
        with pytest.raises(ipcsync.RecorderLost):
            seen.at(1).synchronize(DEADLINE_S)
        assert seen.state == "closed"
    finally:
        may_end.set()


def test_a_close_amid_a_beat_says_goodbye_only_behind_its_closes(
    new_client: NewClient, engine: EngineName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its slots would be another event's while its work is queued."""
    client, other, stream = new_client(), new_client(), ipcsync.Stream()
    event, session = client.event("e", recorder=True, engine=engine), client._session
    seen, beat = other.event("e"), session.attachments.beat

    def close_amid() -> None:
        beat()
        session.is_closed = True  # as another thread's close has it

    with StreamGate(stream):
        event.record(stream)
        monkeypatch.setattr(session.attachments, "beat", close_amid)
        session.owner.wake()
        until(lambda: session.attachments.is_draining, "the end has begun")
        client.close()
        assert not session.lease.line.has_said_goodbye
        assert not seen.at(1).query()
    seen.at(1).synchronize(DEADLINE_S)


def _close_amid_work_with_no_descriptor_left(endpoint: str) -> None:
    client, stream = ipcsync.connect(endpoint), ipcsync.Stream()
    _draining.extend([client, StreamGate(stream).__enter__()])
    client.event("e", recorder=True).record(stream)
    with none_left():
        client.close()


def _ends_well_once_its_work_is_done() -> bool:
    client, gate = _draining
    gate.open()
    session = client._session
    session._thread.join(DEADLINE_S)
    return session.lease._problem is None and not session._thread.is_alive()


def test_a_session_drains_behind_its_close_though_no_descriptor_is_left(
    coordinator: ipcsync.Coordinator, peer: Peer
) -> None:
    peer.call(_close_amid_work_with_no_descriptor_left, coordinator.endpoint)
    assert peer.call(_ends_well_once_its_work_is_done, timeout=2 * DEADLINE_S)


def test_a_close_in_a_finalizer_on_the_thread_that_holds_the_mark_does_not_wait(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end waits for that thread: the session would be there until the close gives up."""
    monkeypatch.setattr(session_module, "_END_S", 10 * DEADLINE_S)
    session = client._session

    class Owner:
        def __del__(self) -> None:
            client.close()

    owners = [Owner()]
    session.lease.mark.on_ring = owners.clear  # as the collector may do, which comes anywhere

    def is_closed() -> bool:
        session.lease.line.doorbell.wake()
        return session.is_closed

    until(is_closed, "the finalizer has begun")
    until(lambda: session._has_ended.is_set, "the session has ended")


def test_a_finalizer_amid_the_end_of_a_session_waits_for_no_such_thread(
    new_client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, other, raised = new_client(), new_client(), list[type[BaseException]]()
    table = client._session.attachments
    end = table.close_all

    def end_amid_a_finalizer(pause: Callable[[], object]) -> None:
        try:
            other.stats()
        except ipcsync.IpcSyncError as error:
            raised.append(type(error))
        end(pause)

    monkeypatch.setattr(table, "close_all", end_amid_a_finalizer)
    client.close()
    assert raised == [ipcsync.Reentered]


def test_threads_may_close_at_once(new_client: NewClient) -> None:
    client, other = new_client(), new_client()
    client.event("e", recorder=True)
    threads = [threading.Thread(target=client.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(other.list_sessions()) == 1
    assert not client.is_connected


def test_many_closes_that_each_take_their_time_cost_no_session(
    new_client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = new_client(lease_ttl=2)
    session = client._session
    events = client.events([f"e{number}" for number in range(60)], recorder=True)
    told = set[int]()
    exchange = Connection.exchange

    def slow(self: Connection, requests: Sequence[Request], *args: Any) -> None:
        for request in requests:
            exchange(self, [request], *args)
            if isinstance(request.body, Close) and request.reply is not None:
                threading.Event().wait(0.045)  # the coordinator has others to serve; a beat allows 50 ms
                if request.body.released:  # a beat may have told before that it drains
                    told.add(request.body.slot)

    monkeypatch.setattr(Connection, "exchange", slow)
    session.abandon([event._attached for event in events])
    until(lambda: len(told) == len(events), "all were told")
    client.check()


@pytest.mark.parametrize("when", ["the greeting is on its way", "the session is ready"])
def test_a_session_whose_caller_is_gone_ends_at_once(
    new_client: NewClient, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = new_client()
    session = Session(observer.endpoint, "abandoned")
    receive, show = Connection._receive, DeathMark.show
    was_seen = []

    def drop_and_receive(connection: Connection, *args: Any) -> int:
        """The caller's exception comes while the reply is on its way."""
        if session.is_closed or connection is not session.connection or not connection.sent:
            return receive(connection, *args)
        session.drop()
        return 0

    def drop_and_show(mark: DeathMark) -> None:
        show(mark)
        was_seen.extend([row for row in observer.list_sessions() if row.name == "abandoned"])
        session.drop()

    if when == "the session is ready":
        monkeypatch.setattr(DeathMark, "show", drop_and_show)
    else:
        monkeypatch.setattr(Connection, "_receive", drop_and_receive)
    with pytest.raises(ipcsync.ClientClosed):
        session.begin(lease_ttl=600.0)
    assert session.connection.sent
    assert len(was_seen) == (when == "the session is ready")
    until(lambda: "abandoned" not in [row.name for row in observer.list_sessions()], "its goodbye was taken")


def test_a_session_whose_caller_is_gone_looks_for_no_coordinator(tmp_path: Path) -> None:
    session = Session(f"ipc://{tmp_path}/none", "abandoned")
    session.drop()
    with pytest.raises(ipcsync.ClientClosed):
        session.begin(timeout=600.0)
    assert not session.connection.sent


def test_at_the_end_of_a_program_calls_are_answered_or_refused_and_none_waits_for_a_thread_that_is_gone(
    coordinator: ipcsync.Coordinator, new_client: NewClient
) -> None:
    observer = new_client("observer")
    run(
        """
        import atexit, os, threading, ipcsync

        client = ipcsync.connect(os.environ["ENDPOINT"], name="leaver")
        said, at_exit = [], []

        def ask(where):
            try:
                said.append((where, client.stats()["events"]))
            except ipcsync.ClientClosed:
                said.append((where, "closed"))

        class Last:
            def __del__(self, ask=ask, said=said, leave=os._exit):
                ask("finalizer")
                leave(said != [("thread", 1), ("exit handler", 1), ("finalizer", "closed")])

        def outlive():
            threading.main_thread().join()
            ask("thread")

        atexit.register(ask, "exit handler")
        last, thread = Last(), threading.Thread(target=outlive)
        thread.start()
        event = client.event("e", recorder=True)
        event.record(ipcsync.Stream())
        """,
        ENDPOINT=coordinator.endpoint,
    )
    until(lambda: [row.name for row in observer.list_sessions()] == ["observer"], "it said goodbye")
    assert observer.list_events() == []


def test_a_program_whose_last_finalizer_closes_an_asynchronous_client_ends(
    coordinator: ipcsync.Coordinator, tmp_path: Path
) -> None:
    """Up to Python 3.11 a thread that is started by then never runs."""
    run(
        """
        import asyncio, os, ipcsync

        class Last:
            def __init__(self, client):
                self.client, self.run, self.tell = client, asyncio.run, os.write
                self.told = os.open(os.environ["TOLD"], os.O_CREAT | os.O_WRONLY)

            def __del__(self):
                self.run(self.client.close())
                self.tell(self.told, b"closed")

        async def connect():
            return Last(await ipcsync.aconnect(os.environ["ENDPOINT"]))

        last = asyncio.run(connect())
        """,
        ENDPOINT=coordinator.endpoint,
        TOLD=str(tmp_path / "told"),
    )
    assert (tmp_path / "told").read_text() == "closed"


def test_an_asynchronous_client_closes_though_the_loops_context_was_destroyed(coordinator: ipcsync.Coordinator) -> None:
    run(
        """
        import asyncio, os, threading, ipcsync
        from cuda import bindings
        from ipcsync._drivers import load, unwrap

        async def main():
            client = await ipcsync.aconnect(os.environ["ENDPOINT"])
            event = await client.event("e", recorder=True)
            parameters = () if bindings.__version__.startswith("12.") else (None,)  # since CUDA 13
            context = unwrap(load().cuCtxCreate(*parameters, 0, 0), "cuCtxCreate")
            thread = threading.Thread(target=load().cuCtxDestroy, args=(context,))  # here it would not be current then
            thread.start()
            thread.join()
            for each in (event, client):
                await each.close()
            assert not client.is_connected

        asyncio.run(main())
        """,
        ENDPOINT=coordinator.endpoint,
    )


def test_a_program_that_ends_closes_all_its_clients_at_once(coordinator: ipcsync.Coordinator) -> None:
    """Each close waits for a second where the coordinator is silent."""
    run(
        """
        import os, threading, ipcsync
        from ipcsync._session.session import Session

        say, all_of_them = Session._say_goodbye, threading.Barrier(4)

        def say_goodbye(session, timeout):
            try:
                all_of_them.wait(10)
            except threading.BrokenBarrierError:
                os._exit(1)
            say(session, timeout)

        Session._say_goodbye = say_goodbye
        clients = [ipcsync.connect(os.environ["ENDPOINT"]) for _ in range(4)]
        """,
        ENDPOINT=coordinator.endpoint,
    )


def test_a_client_from_before_a_reload_of_all_modules_closes(coordinator: ipcsync.Coordinator) -> None:
    run(
        """
        import importlib, logging, os, sys, threading, ipcsync

        failed = []
        logging.getLogger("ipcsync").addFilter(lambda record: failed.append(record.getMessage()) or False)
        threading.excepthook = failed.append
        client = ipcsync.connect(os.environ["ENDPOINT"], name="reloaded")
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "ipcsync":
                importlib.reload(module)
        client.close()
        assert not failed, failed
        """,
        ENDPOINT=coordinator.endpoint,
    )


@pytest.mark.parametrize("what", ["event", "check"])
def test_a_call_that_a_close_overtakes_says_which_client_was_closed(
    new_client: NewClient, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    client = new_client("overtaken")
    session = client._session
    ask = session._call

    def ask_and_be_overtaken(*arguments: Any) -> object:
        answer = ask(*arguments)
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=client.close)
            thread.start()
            thread.join()
        return answer

    monkeypatch.setattr(session, "_call", ask_and_be_overtaken)
    with pytest.raises(ipcsync.ClientClosed, match=r"'overtaken' of .* was closed by this process") as raised:
        client.event("e", engine="event") if what == "event" else client.check()
    assert (raised.value.client, raised.value.endpoint) == (client.name, client.endpoint)


def test_points_whose_callers_go_do_not_pile_up(new_client: NewClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def alarm(*_: object) -> None:
        raise InterruptedError  # as a signal's handler does, once the coordinator has attached the session

    recorder, reader = new_client(), new_client(lease_ttl=60.0)
    events = [recorder.event(f"e/{index}", recorder=True) for index in range(3 * MANY_POINTS)]
    session = reader._session
    monkeypatch.setattr(session.driving, "test", alarm)
    most = 0
    for event in events:
        with pytest.raises(InterruptedError):
            reader.point(bytes(event.record())).query()
        most = max(most, len(session.attachments.uses))
    assert most <= MANY_POINTS + 1  # one may be under way as a beat comes, from which the others count
    until(lambda: not session.attachments.uses, "a beat ended the last ones, though their events are open")


def test_the_end_waits_for_no_callback_that_closes_its_own_client(
    new_client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the end comes to that, also while the close is still about to end the open replays."""
    client = new_client()
    join, waits_for, threads = client._session.waits.join, list[int](), list[int]()

    def note(timeout: float, closer: int, *pause: Any) -> None:
        waits_for.append(closer)
        join(timeout, closer, *pause)

    def close(_: object) -> None:
        threads.append(threading.get_ident())
        client.close()

    monkeypatch.setattr(client._session.waits, "join", note)
    monkeypatch.setattr(client_module, "end_all", lambda _: until(lambda: waits_for, "the end waits for callbacks"))
    client.record(ipcsync.Stream()).add_done_callback(close)
    until(lambda: client._session._has_ended.is_set, "the end")
    assert waits_for == threads
