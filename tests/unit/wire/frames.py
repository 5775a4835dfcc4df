"""Strategies for what travels: every request as it should be, and frames that are nearly one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgpack
from hypothesis import strategies as st

from ipcsync._wire import codec, messages
from ipcsync.errors import ProtocolError
from tests.kit.examples import examples

MANY = examples(300)

names = st.sampled_from(["a", "b", "a/b", "..", "", "\x00", "x" * 255]) | st.text(
    st.characters(codec="utf-8"), max_size=20
)
counts = st.integers(0, 4) | st.integers(0, (1 << 63) - 1)
tokens = st.binary(min_size=16, max_size=16)
_texts = st.text(st.characters(codec="utf-8"), max_size=20)
_engines = st.sampled_from(["auto", "event", "timeline", "magic"])

hellos = st.builds(
    messages.Hello,
    nonce=tokens,
    driver=st.just(os.environ.get("IPCSYNC_DRIVER", "host")) | st.sampled_from(["host", "cuda", ""]),
    name=names,
    namespace=counts,
    shm=_texts,
    pid=counts,
    lease_ttl=st.none() | st.floats(),
    role=st.sampled_from(["", "", "", "bridge", "queen"]),
)
opens = st.builds(
    messages.Open, name=names, recorder=st.booleans(), device=st.sampled_from(["", "no"]), default_device=st.just(""),
    engine=_engines, depth=st.integers(1, 5),
)  # fmt: skip
bodies_of: dict[type[messages.RequestBody], st.SearchStrategy[messages.RequestBody]] = {
    messages.Hello: hellos,
    messages.Open: opens,
    messages.Ready: st.builds(messages.Ready),
    messages.Attach: st.builds(messages.Attach, slot=counts, incarnation=counts),
    messages.Close: st.builds(
        messages.Close, slot=counts, incarnation=counts, released=st.booleans(), drained=st.booleans()
    ),
    messages.Break: st.builds(messages.Break, slot=counts, incarnation=counts),
    messages.OpenStream: st.builds(messages.OpenStream, name=names, device=_texts, priority=st.integers(-1024, 1024)),
    messages.ListEvents: st.builds(messages.ListEvents, prefix=names),
    messages.ListSessions: st.builds(messages.ListSessions),
    messages.ListAttachments: st.builds(messages.ListAttachments, prefix=names, limit=st.integers(0, 100_000)),
    messages.Stats: st.builds(messages.Stats),
    messages.Snapshot: st.builds(messages.Snapshot, prefix=names, is_resync=st.booleans()),
    messages.Probe: st.builds(messages.Probe, device=st.sampled_from(["", "no"])),
    messages.Bye: st.builds(messages.Bye, released=st.booleans()),
    messages.Remote: st.builds(
        messages.Remote,
        what=st.sampled_from(["attach", "open", "claim", "nodes", "events", "bridge"]),
        node=names,
        name=names,
        epoch=tokens | st.just(b""),
        slot=counts,
        incarnation=counts,
    ),
    messages.Import: st.builds(
        messages.Import,
        want=counts,
        epoch=tokens,
        slot=counts,
        incarnation=counts.map(lambda count: count or 1),
        node=names,
        name=names,
    ),
    messages.Answer: st.builds(messages.Answer, want=counts, reply=st.binary(max_size=20)),
    messages.Finish: st.builds(
        messages.Finish,
        slot=counts,
        incarnation=counts,
        state=st.sampled_from(["broken", "closed", "unwanted"]),
        reason=st.sampled_from(["silent", "died", "expired", "", "boredom"]),
    ),
    messages.ListWants: st.builds(messages.ListWants),
}
bodies = st.one_of(*bodies_of.values())
ids = st.integers(1, 40) | st.integers(1, (1 << 63) - 1)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary(max_size=40) | names,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(names | st.binary(max_size=4), inner, max_size=6),
    max_leaves=20,
)


@st.composite
def frames(draw: st.DrawFn, token: st.SearchStrategy[bytes] = tokens) -> bytes:
    """A well-formed request of any kind."""
    deadline = draw(st.sampled_from([0] * 8 + [1, (1 << 64) - 1]))
    return codec.encode_request(draw(ids), draw(bodies), draw(token), deadline)


@st.composite
def mutated(draw: st.DrawFn, token: st.SearchStrategy[bytes] = tokens) -> bytes:
    """A well-formed request in which bytes were changed, cut out or put in."""
    frame = bytearray(draw(frames(token)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(frame) - 1, 0)))
        kind = draw(st.sampled_from(["change", "cut", "insert", "end"]))
        if kind == "change" and frame:
            frame[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del frame[at : at + draw(st.integers(1, 8))]
        elif kind == "insert":
            frame[at:at] = draw(st.binary(min_size=1, max_size=8))
        else:
            del frame[at:]
    return bytes(frame)


@st.composite
def ill_typed(draw: st.DrawFn, token: st.SearchStrategy[bytes] = tokens) -> bytes:
    """Six parts as a request has, one of which may be anything, or a body with any fields."""
    op = draw(st.sampled_from(list(messages.REQUESTS)))
    parts: list[Any] = [messages.VERSION, draw(ids), op, draw(token), 0, draw(values)]
    parts[draw(st.integers(0, 5))] = draw(values)
    return bytes(msgpack.packb(parts))


def anything(token: st.SearchStrategy[bytes] = tokens) -> st.SearchStrategy[bytes]:
    """Frames of every sort, from noise to flawless."""
    return st.one_of(
        frames(token),
        frames(token),
        frames(token),
        mutated(token),
        ill_typed(token),
        st.binary(max_size=300),
        values.map(lambda value: bytes(msgpack.packb(value))),
        st.builds(_repeat, st.sampled_from([b"\x91", b"\x81\xa1a", b"\xdc\x0f\xff"]), st.integers(0, 3000)),
    )


def _repeat(what: bytes, times: int) -> bytes:
    return what * times


def decoded(decode: Callable[[bytes], object], frame: bytes) -> object:
    """What is in the frame, or None if it is refused as it should be."""
    try:
        return decode(frame)
    except ProtocolError as error:
        refusal = error
    assert refusal.code in ("malformed", "version", "unknown_op", "invalid", "too_large")
    assert len(str(refusal)) < 1000
    return None
