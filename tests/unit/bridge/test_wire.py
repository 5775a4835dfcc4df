"""Messages between bridges: read as they were sent, and whatever else comes is a ProtocolError that costs little."""

from __future__ import annotations

import tracemalloc
from typing import get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("nats", reason="nats-py is not installed: pip install -e '.[fleet]'")

from ipcsync._wire import codec
from ipcsync._wire.messages import BridgeInfo, PeerInfo
from ipcsync.errors import ProtocolError
from ipcsync_bridge import wire
from ipcsync_bridge.remote_requests import PEERS_SHOWN
from ipcsync_bridge.transport import MAX_BYTES
from tests.unit.wire.frames import MANY

_ID = b"i" * 16
_ROWS = [
    wire.Row(1, 2, 9, 8, 0, "open"),
    wire.Row(3, 1 << 40, 5, 5, 4, "broken", "expired"),
    wire.Row(4, 4, state="gone"),
]
_BODIES = [
    wire.Open("kv/ready"),
    wire.Attach(_ID, (1, 2)), wire.Ping(), wire.Events("kv"), wire.Follow(_ID, 7, True, [(3, 1 << 60)]),
    wire.State(1, _ID, _ROWS[1]), wire.Pong(1, _ID, _ID, 3), wire.Listed(b"x"), wire.Refused("EventClosed", "why"),
    wire.News(1, _ID, _ROWS), wire.Ack(), wire.Over(4, _ID, "stopped"),
]  # fmt: skip


@pytest.mark.parametrize("body", _BODIES, ids=lambda body: type(body).__name__)
def test_a_message_is_read_as_it_was_sent(body: wire.Message) -> None:
    assert wire.decode(wire.encode(body)) == body


def test_every_kind_is_among_those_that_are_tried() -> None:
    assert {type(body) for body in _BODIES} == set(get_args(wire.Message))


def test_a_name_that_no_event_can_have_is_refused() -> None:
    with pytest.raises(ProtocolError, match="length"):
        wire.decode(wire.encode(wire.Open("n" * 256)))


_NO_ROWS = {
    "a state": [1, 2, 0, 0, 0, "opened"],
    "a cause": [1, 2, 0, 0, 0, "broken", "behind"],
    "a slot": [1 << 32, 2],
    "a negative one": [1, 2, -1],
    "a number": [1, 1 << 62],
    "a generation that uses up a slot's": [1, 2, 1 << 50],
    "a use": [1],
}


@pytest.mark.parametrize("row", _NO_ROWS.values(), ids=_NO_ROWS)
def test_rows_that_are_none_are_refused(row: list[object]) -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.decode(bytes(msgpack.packb([wire.VERSION, ["news", 1, _ID, [row]]])))
    assert caught.value.code == "invalid"


def test_a_message_holds_as_many_of_the_longest_rows_as_it_may() -> None:
    most, generation = (1 << 62) - 1, (1 << 50) - 1
    rows = [wire.Row((1 << 32) - 1, most, generation, generation, generation, "broken", "expired")] * wire.MAX_ROWS
    assert wire.decode(wire.encode(wire.News(most, _ID, rows))) == wire.News(most, _ID, rows)
    keys = [((1 << 32) - 1, (1 << 32) - 1)] * wire.MAX_KEYS
    assert wire.decode(wire.encode(wire.Follow(_ID, 1, False, keys))) == wire.Follow(_ID, 1, False, keys)


def test_more_than_one_message_holds_is_refused_at_both_ends() -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.encode(wire.Listed(b"x" * MAX_BYTES))
    assert caught.value.code == "too_large"
    with pytest.raises(ProtocolError):
        wire.decode(b"\0" * (MAX_BYTES + 1))
    with pytest.raises(ProtocolError):
        wire.decode(wire.encode(wire.News(1, _ID, [wire.Row(1, 2)] * (wire.MAX_ROWS + 1))))


_anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=20) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@MANY
@given(st.binary(max_size=200) | _anything.map(lambda value: bytes(msgpack.packb(value))))
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    try:
        wire.decode(data)
    except ProtocolError:
        return


@MANY
@given(st.sampled_from([type(body).__name__.lower() for body in _BODIES]), st.lists(_anything, max_size=7))
def test_any_body_of_any_kind_is_a_message_or_a_protocol_error(kind: str, body: list[object]) -> None:
    try:
        message = wire.decode(bytes(msgpack.packb([wire.VERSION, [kind, *body]])))
        assert wire.decode(wire.encode(message)) == message
    except ProtocolError:
        return


_MANY_KEYS = b"\x92\x02\x95\xa6follow\xc4\x10" + _ID + b"\x01\xc2\xdc\x50\x00" + b"\x92\x00\x00" * 20_480
_MANY_ROWS = b"\x92\x02\x94\xa4news\x01\xc4\x10" + _ID + b"\xdc\x50\x00" + b"\x92\x00\x00" * 20_480


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\x93" * 60_000,
        b"\x92\x02\x94\xa4news\x01\xc6\xff\xff\xff\xff",
        _MANY_KEYS,
        _MANY_ROWS,
    ],
)
def test_what_claims_to_be_large_costs_little(data: bytes) -> None:
    tracemalloc.start()
    try:
        for _ in range(50):
            with pytest.raises(ProtocolError):
                wire.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_what_a_bridge_says_of_as_many_nodes_as_it_tells_of_fits_in_an_answer() -> None:
    peers = [PeerInfo("n" * 63, "linked", 4096, 4096, 4096, 1.234)] * PEERS_SHOWN
    counts = {f"a_count_of_something_{number}": 10**9 for number in range(40)}
    info = BridgeInfo("n" * 63, "f" * 63, 99999, "nats://" + "s" * 200, 4096, 4096, peers, counts, {}, {})
    assert len(codec.encode_reply(0, info)) <= wire.MAX_ANSWER


def test_a_message_of_another_version_is_refused_and_not_read() -> None:
    data = msgpack.packb([wire.VERSION + 1, {"ping": 0}])
    with pytest.raises(ProtocolError, match=r"^bridges' protocol 3, and this is 2$") as caught:
        wire.decode(bytes(data))
    assert caught.value.code == "version"
