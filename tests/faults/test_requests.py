"""One request, one reply, done once, and only to what is one's own: rows 15 and 17."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable

import pytest
import zmq

import ipcsync
from ipcsync._wire import codec, messages
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults import fixtures
from tests.kit.peer import Peer
from tests.kit.raw_client import Raw
from tests.kit.until import until

pytestmark = [pytest.mark.driver, pytest.mark.keeper]

NewClient = Callable[..., ipcsync.Client]
NewCoordinator = Callable[..., ipcsync.Coordinator]

# --- row 15 -----------------------------------------------------------------------------------------------------------


@pytest.mark.own_coordinator
def test_row_15_a_retried_request_gets_the_same_reply_and_is_done_once(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    with Raw(coordinator.endpoint) as raw:
        token = raw.hello().token
        bodies = [messages.Open("", recorder=True), messages.Open("e", recorder=True), messages.OpenStream("s")]
        for request_id, body in enumerate(bodies, start=10):
            frame = codec.encode_request(request_id, body, token, 0)
            replies = {raw.exchange(frame) for _ in range(3)}
            assert len(replies) == 1
        assert sorted(row.name for row in client.list_events()) == ["", "e"]
        stats = client.stats()
        assert (stats["pool_in_use"], stats["requests"]["open"]) == (2, 2)


def test_row_15_a_retried_refusal_is_the_same_refusal(coordinator: ipcsync.Coordinator, client: ipcsync.Client) -> None:
    held = client.event("e", recorder=True)
    with Raw(coordinator.endpoint) as raw:
        token = raw.hello().token
        frame = codec.encode_request(10, messages.Open("e", recorder=True), token, 0)
        refusal = raw.exchange(frame)
        held.close()  # the name is free: tried anew, the same request would succeed
        assert raw.exchange(frame) == refusal
        assert isinstance(codec.decode_reply(refusal)[1], messages.Failure)


def test_row_15_a_retried_close_does_not_close_what_was_opened_since(new_coordinator: NewCoordinator) -> None:
    with Raw(new_coordinator(pool=1).endpoint) as raw:
        token = raw.hello().token
        first = raw.ask(messages.Open("e", recorder=True), token, messages.Attachment)
        close = codec.encode_request(100, messages.Close(first.slot, first.incarnation), token, 0)
        done = raw.exchange(close)
        second = raw.ask(messages.Open("e", recorder=True), token, messages.Attachment, request_id=101)
        assert (second.slot, second.incarnation) == (first.slot, first.incarnation + 1)
        assert raw.exchange(close) == done
        (row,) = raw.ask(messages.ListEvents(), token, messages.EventList, request_id=102).events
        assert (row.state, row.attached) == ("open", 1)


def test_row_15_a_retried_hello_gives_the_same_session(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    with Raw(coordinator.endpoint) as raw:
        first = raw.hello("retrier", nonce=b"n" * 16)
        assert raw.hello("retrier", nonce=b"n" * 16) == first
        assert [row.name for row in client.list_sessions()].count("retrier") == 1


def test_row_15_a_retried_goodbye_gets_the_same_reply(coordinator: ipcsync.Coordinator, client: ipcsync.Client) -> None:
    with Raw(coordinator.endpoint) as raw:
        token = raw.hello().token
        goodbye = codec.encode_request(10, messages.Bye(), token, 0)
        done = raw.exchange(goodbye)
        assert isinstance(codec.decode_reply(done)[1], messages.Done)
        assert raw.exchange(goodbye) == done
        assert isinstance(raw.refused(messages.ListSessions(), token), ipcsync.SessionExpired)
    assert [row.name for row in client.list_sessions()] == ["main"]


def test_row_15_a_reply_forgotten_since_is_a_typed_error_and_not_done_again(
    new_coordinator: Callable[..., ipcsync.Coordinator],
) -> None:
    coordinator = new_coordinator(remembered_requests=2)
    with Raw(coordinator.endpoint) as raw:
        token = raw.hello().token
        for request_id in (10, 11, 12):
            raw.ask(messages.Open("", recorder=True), token, messages.Attachment, request_id=request_id)
        failure = raw.ask(messages.Open("", recorder=True), token, messages.Failure, request_id=10)
        assert failure.attributes["code"] == "forgotten"
        assert len(raw.ask(messages.ListEvents(), token, messages.EventList, request_id=13).events) == 3


class _LossyRelay(threading.Thread):
    """Stands between a client and its coordinator, and loses the first reply of each kind named."""

    def __init__(self, endpoint: str, own: str, lose: set[type[messages.Message]]) -> None:
        super().__init__(daemon=True)
        self.endpoint = own
        self.lost: list[type[messages.Message]] = []
        self._lose = lose
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._back = self._context.socket(zmq.DEALER)
        self._ending = threading.Event()
        self._routing = b""
        self._front.bind(own)
        self._back.connect(endpoint)

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        poller.register(self._back, zmq.POLLIN)
        while not self._ending.is_set():
            for ready, _ in poller.poll(20):
                with contextlib.suppress(zmq.Again):  # what was there went with the connection it came by
                    if ready is self._front:
                        self._routing, frame = self._front.recv_multipart(zmq.NOBLOCK)
                        self._back.send(frame)
                    else:
                        self._pass_back(self._back.recv(zmq.NOBLOCK))
        self._context.destroy(linger=0)

    def _pass_back(self, frame: bytes) -> None:
        kind = type(codec.decode_reply(frame)[1])
        if kind in self._lose:
            self._lose.remove(kind)
            self.lost.append(kind)
        else:
            self._front.send_multipart([self._routing, frame])

    def stop(self) -> None:
        self._ending.set()
        self.join(10)
        assert not self.is_alive()


def test_row_15_a_client_whose_reply_was_lost_asks_again_and_it_was_done_once(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    relay = _LossyRelay(coordinator.endpoint, f"ipc://{coordinator.runtime_dir}/relay.sock", {messages.Attachment})
    relay.start()
    try:
        with ipcsync.connect(relay.endpoint, name="behind") as behind:
            point = behind.record(ipcsync.Stream())
            point.synchronize(10)
            assert relay.lost == [messages.Attachment]
            assert len(client.list_events()) == 1
    finally:
        relay.stop()
    assert client.list_events() == []


# --- row 17 -----------------------------------------------------------------------------------------------------------


def test_row_17_closing_twice_does_nothing(new_coordinator: NewCoordinator) -> None:
    endpoint = new_coordinator(pool=1).endpoint
    with ipcsync.connect(endpoint) as client, Raw(endpoint) as raw:
        event = client.event("e", recorder=True)
        event.close()
        event.close()
        until(lambda: client.list_events() == [], "the close is told")
        token = raw.hello().token
        held = raw.ask(messages.Open("e", recorder=True), token, messages.Attachment)
        for _ in range(3):
            raw.ask(messages.Close(held.slot, held.incarnation), token, messages.Done)
        again = raw.ask(messages.Open("e", recorder=True), token, messages.Attachment)
        raw.ask(messages.Close(held.slot, held.incarnation), token, messages.Done)
        assert again.incarnation == held.incarnation + 1
        (row,) = client.list_events()
        assert (row.state, row.attached) == ("open", 1)


def test_row_17_closing_an_object_twice_leaves_another_object_over_the_attachment_open(client: ipcsync.Client) -> None:
    first, second = client.event("e"), client.event("e", recorder=True)
    first.close()
    first.close()
    assert second.record(ipcsync.Stream()).generation == 1


@pytest.mark.own_coordinator
def test_row_17_closing_another_sessions_attachment_is_refused(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    event = client.event("e", recorder=True)
    (row,) = client.list_events()
    with Raw(coordinator.endpoint) as raw:
        token = raw.hello().token
        known = raw.ask(messages.ListEvents(), token, messages.EventList).events[0]
        for released in (True, False):
            error = raw.refused(messages.Close(known.slot, known.incarnation, released), token)
            assert isinstance(error, ipcsync.EventClosed)
        for slot, incarnation in ((known.slot, known.incarnation + 1), (known.slot + 1, 1), (1 << 62, 1)):
            assert isinstance(raw.refused(messages.Close(slot, incarnation), token), ipcsync.EventClosed)
    assert client.stats()["refusals"]["EventClosed"] == 5
    assert client.list_events() == [row]
    assert event.record(ipcsync.Stream()).generation == 1


def test_row_17_recording_without_the_role_is_refused(new_client: NewClient) -> None:
    recorder, waiter = new_client("recorder"), new_client("waiter")
    mine, theirs = recorder.event("e", recorder=True), waiter.event("e")
    with pytest.raises(ipcsync.NotRecorder):
        theirs.record(ipcsync.Stream())
    assert theirs.generation == 0
    assert mine.record(ipcsync.Stream()).generation == 1


def _open_as_recorder(endpoint: str, name: str) -> tuple[str, str]:
    """In the peer: what became of the attempt, and who has the role."""
    with ipcsync.connect(endpoint, name="second") as client:
        try:
            client.event(name, recorder=True)
        except ipcsync.RecorderTaken as error:
            return "RecorderTaken", error.recorder
        return "opened", client.list_events(name)[0].recorder


@pytest.mark.own_coordinator
def test_row_17_a_second_recorder_is_refused_until_the_first_has_closed(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer
) -> None:
    event = client.event("e", recorder=True)
    assert peer.call(_open_as_recorder, coordinator.endpoint, "e") == ("RecorderTaken", "main")
    assert client.stats()["refusals"]["RecorderTaken"] == 1
    event.record(ipcsync.Stream()).synchronize(10)
    event.close()
    until(lambda: client.list_events() == [], "the close is told")
    assert peer.call(_open_as_recorder, coordinator.endpoint, "e") == ("opened", "second")


def test_row_17_of_two_recorders_at_once_exactly_one_gets_the_role(
    coordinator: ipcsync.Coordinator, new_client: NewClient
) -> None:
    clients = [new_client(f"c{number}") for number in range(4)]
    got: list[str] = []
    barrier = threading.Barrier(len(clients))

    def open_all(client: ipcsync.Client) -> None:
        for number in range(25):
            barrier.wait(20)
            try:
                client.event(f"e{number}", recorder=True)
            except ipcsync.RecorderTaken as error:
                got.append(f"refused for {error.recorder}")
            else:
                got.append("recorder")

    threads = [threading.Thread(target=open_all, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got.count("recorder") == 25
    assert len(got) == 100
    until(lambda: len(clients[0].list_events()) == 25, "each event is there once")


@pytest.mark.parametrize("engine", ["event", "timeline"])
def test_a_slot_is_not_released_while_its_recorder_uses_it_again_through_a_point(
    new_coordinator: Callable[..., ipcsync.Coordinator], engine: EngineName
) -> None:
    coordinator = new_coordinator(pool=1)
    with ipcsync.connect(coordinator.endpoint) as recorder, ipcsync.connect(coordinator.endpoint) as other:
        event = recorder.event("e", recorder=True, engine=engine)
        stream = ipcsync.Stream()
        with StreamGate(stream) as gate:
            data = bytes(event.record(stream))
            event.close()  # its work is pending: it lingers
            again = recorder.point(data)
            gate.open()
            again.synchronize(10)
            recorder._session.owner.wake()
            until(lambda: not recorder._session.attachments.ending, "what lingered is let go of")
        with pytest.raises(ipcsync.QuotaExceeded):
            other.event("f", engine=engine)
        assert again.query()
        del again
        until(lambda: other.stats()["pool_in_use"] == 0, "it has let go")
        assert other.event("f", recorder=True, engine=engine).record(ipcsync.Stream()).generation == 1


# --- signals ----------------------------------------------------------------------------------------------------------


def test_a_request_ends_by_its_timeout_though_signals_never_stop(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    """They come faster than the slices in which a wait looks at its deadline."""
    count = itertools.count()

    def take(*_: object) -> None:
        assert next(count) < 1000, "the request goes on for 20 s"

    before = signal.signal(signal.SIGALRM, take)
    fixtures.stop(coordinator.pid)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        with pytest.raises(ipcsync.WaitTimeout):
            client.stats(timeout=0.5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        fixtures.resume(coordinator.pid)
