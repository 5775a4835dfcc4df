"""The feed's subscriber without a socket: whatever is lost, a snapshot leads to the coordinator's state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from ipcsync._session.feed import Notice, Replay
from ipcsync._wire.messages import Announcement, EventInfo, SessionInfo, SnapshotReply
from ipcsync.typing import EventState
from tests.kit.examples import examples


@dataclass
class Publisher:
    """What a coordinator announces, and the snapshots that it would give."""

    number: int = 0
    events: dict[tuple[int, int], EventInfo] = field(default_factory=dict)
    sessions: dict[str, SessionInfo] = field(default_factory=dict)
    made: int = 0

    def announce(self, kind: str, **fields: object) -> Announcement:
        self.number += 1
        return Announcement(number=self.number, kind=kind, **fields)  # type: ignore[arg-type] # checked by msgspec

    def tick(self) -> Announcement:
        return Announcement(number=self.number, kind="tick")

    def open_event(self, name: str) -> Announcement:
        self.made += 1
        key = (self.made % 3, self.made)  # slots come again, their incarnations do not
        self.events[key] = row(name, key)
        return self.announce("opened", name=name, slot=key[0], incarnation=key[1], device="d", engine="event")

    def end_event(self, key: tuple[int, int], kind: EventState, *, keep: bool) -> Announcement:
        """`keep`: in quarantine, so that a snapshot still tells how it ended."""
        old = self.events.pop(key)
        if keep:
            self.events[key] = row(old.name, key, kind)
        return self.announce(kind, name=old.name, slot=key[0], incarnation=key[1])

    def open_session(self, name: str) -> Announcement:
        self.made += 1
        session = f"s{self.made}"
        self.sessions[session] = SessionInfo(session, name, 1, 0, 0.0, 0.0)
        return self.announce("session_opened", name=name, session=session)

    def end_session(self, session: str) -> Announcement:
        old = self.sessions.pop(session)
        return self.announce("session_closed", name=old.name, session=session)

    def open_keys(self) -> list[tuple[int, int]]:
        return [key for key, found in self.events.items() if found.state == "open"]

    def snapshot(self, prefix: str = "") -> SnapshotReply:
        events = [found for found in self.events.values() if found.name.startswith(prefix)]
        return SnapshotReply(self.number, events, list(self.sessions.values()))


def row(name: str, key: tuple[int, int], state: EventState = "open") -> EventInfo:
    return EventInfo(name, "d", "event", state, 0, 0, 1, "", key[0], key[1])


class Reader:
    """Takes announcements in, asks for a snapshot on a gap, and keeps what the notices say is open."""

    def __init__(self, publisher: Publisher, prefix: str = "", sessions: str = "") -> None:
        self.publisher = publisher
        self.prefix = prefix
        self.replay = Replay(prefix, sessions)
        self.notices: list[Notice] = []
        self.events: list[str] = []
        self.sessions: set[str] = set()
        self.resync()

    def resync(self) -> None:
        self.take(self.replay.resync(self.publisher.snapshot(self.prefix)))

    def hear(self, announcement: Announcement) -> None:
        if self.replay.is_behind(announcement):
            self.resync()
        else:
            self.take(self.replay.apply(announcement))

    def take(self, notices: list[Notice]) -> None:
        for notice in notices:
            assert not self.notices or notice.number >= self.notices[-1].number
            self.notices.append(notice)
            if notice.kind == "opened":
                self.events.append(notice.name)
            elif notice.kind in ("closed", "broken"):
                self.events.remove(notice.name)
                assert (notice.device, notice.engine) == ("d", "event")
            elif notice.kind.startswith("recorder_"):
                assert self.notices[-2].number == notice.number
            elif notice.kind == "session_opened":
                assert notice.session not in self.sessions
                self.sessions.add(notice.session)
            else:
                self.sessions.remove(notice.session)


def change(publisher: Publisher, draw: st.DrawFn) -> Announcement:
    names = st.sampled_from(["a", "a/b", "b", ""])
    kinds = ["open", "session"]
    kinds += ["end", "unwanted"] if publisher.open_keys() else []
    kinds += ["leave"] if publisher.sessions else []
    kind = draw(st.sampled_from(kinds))
    if kind == "open":
        return publisher.open_event(draw(names))
    if kind == "unwanted":
        slot, incarnation = draw(st.sampled_from(publisher.open_keys()))
        return publisher.announce("unwanted", slot=slot, incarnation=incarnation)
    if kind == "session":
        return publisher.open_session(draw(names))
    if kind == "end":
        key = draw(st.sampled_from(publisher.open_keys()))
        return publisher.end_event(key, draw(st.sampled_from(["closed", "broken"])), keep=draw(st.booleans()))
    return publisher.end_session(draw(st.sampled_from(sorted(publisher.sessions))))


@examples(100)
@given(st.data(), st.sampled_from(["", "a", "c"]), st.sampled_from(["", "b"]))
def test_whatever_is_lost_the_state_is_the_coordinators(data: st.DataObject, prefix: str, sessions: str) -> None:
    publisher = Publisher()

    @st.composite
    def next_change(draw: st.DrawFn) -> Announcement:
        return change(publisher, draw)

    for _ in range(data.draw(st.integers(0, 5), label="before")):
        data.draw(next_change())
    reader = Reader(publisher, prefix, sessions)
    queue: list[Announcement] = []
    for _ in range(data.draw(st.integers(0, 15), label="changes")):
        announcement = data.draw(next_change())
        fate = data.draw(st.sampled_from(["heard", "late", "lost", "twice"]), label="fate")
        if fate == "lost":
            continue
        queue += [announcement] * (2 if fate == "twice" else 1)
        if fate != "late":  # a slow reader hears of several only after all of them happened
            for heard in queue:
                reader.hear(heard)
            queue.clear()
    for heard in queue:
        reader.hear(heard)
    reader.hear(publisher.tick())
    wanted = sorted(found.name for found in publisher.snapshot(prefix).events if found.state == "open")
    assert sorted(reader.events) == wanted
    assert reader.sessions == {key for key, found in publisher.sessions.items() if found.name.startswith(sessions)}


@examples(100)
@given(st.data())
def test_without_a_loss_each_change_is_told_once_in_order(data: st.DataObject) -> None:
    publisher = Publisher()
    reader = Reader(publisher)

    @st.composite
    def next_change(draw: st.DrawFn) -> Announcement:
        return change(publisher, draw)

    changes = [data.draw(next_change()) for _ in range(data.draw(st.integers(0, 15)))]
    for announcement in changes:
        reader.hear(announcement)
    told = [announcement for announcement in changes if announcement.kind != "unwanted"]
    assert [(n.kind, n.name, n.number) for n in reader.notices] == [(c.kind, c.name, c.number) for c in told]


def test_what_is_announced_for_the_bridge_is_no_change_to_anyone_else() -> None:
    publisher = Publisher()
    reader = Reader(publisher)
    reader.hear(publisher.open_event("mirror"))
    slot, incarnation = key = publisher.open_keys()[0]
    reader.hear(publisher.announce("wanted"))
    reader.hear(publisher.announce("unwanted", slot=slot, incarnation=incarnation))
    assert reader.events == ["mirror"]
    reader.hear(publisher.end_event(key, "closed", keep=False))
    assert [notice.kind for notice in reader.notices] == ["opened", "closed"]


def test_a_tick_tells_of_a_loss_and_of_nothing_else() -> None:
    publisher = Publisher()
    reader = Reader(publisher)
    reader.hear(publisher.tick())
    assert reader.notices == []
    publisher.open_event("lost")
    reader.hear(publisher.tick())
    assert reader.events == ["lost"]


def test_an_event_that_was_closed_and_then_breaks_ends_once() -> None:
    publisher = Publisher()
    reader = Reader(publisher)
    reader.hear(publisher.open_event("e"))
    key = publisher.open_keys()[0]
    reader.hear(publisher.end_event(key, "closed", keep=True))
    reader.hear(publisher.announce("broken", name="e", slot=key[0], incarnation=key[1]))
    assert [notice.kind for notice in reader.notices] == ["opened", "closed"]


def test_a_recorders_end_follows_its_events_and_nothing_else_does() -> None:
    publisher = Publisher()
    reader = Reader(publisher)
    for cause, kind in [("closed", "closed"), ("died", "broken"), ("expired", "broken"), ("behind", "broken")]:
        reader.hear(publisher.open_event(cause))
        (key,) = publisher.open_keys()
        publisher.events.clear()
        ended = {"slot": key[0], "incarnation": key[1], "session": "r", "pid": 7, "cause": cause}
        reader.hear(publisher.announce(kind, name=cause, **ended))
        told, *more = [notice for notice in reader.notices if notice.number == publisher.number]
        assert (told.kind, told.session, told.pid, told.cause) == (kind, "r", 7, cause)
        assert [notice.kind for notice in more] == ([] if cause == "behind" else [f"recorder_{cause}"])
        assert [replace(notice, kind=told.kind) for notice in more] == [told] * len(more)


def test_a_gap_tells_how_an_event_ended_while_that_is_known() -> None:
    publisher = Publisher()
    reader = Reader(publisher)
    reader.hear(publisher.open_event("broken"))
    reader.hear(publisher.open_event("freed"))
    broken, freed = publisher.open_keys()
    publisher.end_event(broken, "broken", keep=True)
    publisher.end_event(freed, "broken", keep=False)
    reader.hear(publisher.tick())
    assert {(n.kind, n.name) for n in reader.notices[2:]} == {("broken", "broken"), ("closed", "freed")}


def test_a_name_that_was_opened_anew_in_a_gap_is_told_as_closed_and_opened() -> None:
    publisher = Publisher()
    reader = Reader(publisher)
    reader.hear(publisher.open_event("e"))
    publisher.end_event(publisher.open_keys()[0], "closed", keep=False)
    publisher.open_event("e")
    reader.hear(publisher.tick())
    assert [notice.kind for notice in reader.notices] == ["opened", "closed", "opened"]
