"""The version policy (docs/versions.md): what changed since the last release has a version above that release's."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import pytest

from ipcsync._board import layout as board
from ipcsync._trace import file as trace
from ipcsync._wire import codec, messages
from ipcsync._wire.codec import fields_of, wire
from ipcsync._wire.messages import Message, Name, Text


def _layout(module: Any) -> Any:
    """The numbers, formats and kinds of a layout module."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name in ("VERSION", "TYPE_CHECKING"):
            continue
        if name.isupper() and isinstance(value, int | bytes | struct.Struct):
            found[name] = value.format if isinstance(value, struct.Struct) else repr(value)
        elif isinstance(value, type) and issubclass(value, IntEnum) and value is not IntEnum:
            found[name] = {member.name: int(member) for member in value}
    return found


def _digest(described: Any) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


class Released(NamedTuple):
    """A format as the last release has it."""

    version: int
    digest: str


# 0.1.0. Brought up to date at a release, and only then; the failing test prints the digest.
_RELEASED = {
    "wire": Released(1, "654d3220ecbef3ce"),
    "board": Released(3, "4d40749d47fd751a"),
    "trace": Released(1, "7f51b20d8080dd17"),
}
_PRESENT: dict[str, tuple[Callable[[], Any], int, str]] = {
    "wire": (wire, messages.VERSION, "ipcsync/_wire/messages.py"),
    "board": (lambda: _layout(board), board.VERSION, "ipcsync/_board/layout.py"),
    "trace": (lambda: _layout(trace), trace.VERSION, "ipcsync/_trace/file.py"),
}


@pytest.mark.parametrize("name", _PRESENT)
def test_a_format_that_changed_since_the_release_has_a_version_above_it(name: str) -> None:
    describe, version, file = _PRESENT[name]
    released, digest = _RELEASED[name], _digest(describe())
    if digest == released.digest:
        assert version == released.version, f"the {name} is the release's: VERSION in {file} is raised for nothing"
    else:
        assert version == released.version + 1, (
            f"the {name} changed ({digest}): raise VERSION in {file}, once a release"
        )


class Inner(Message, frozen=True):
    """A message within another one, whose types are looked up by their names."""

    depth: int = 8


def test_a_change_of_the_wire_is_seen() -> None:
    class Renamed(messages.Close, frozen=True):
        colour: str = ""

    class Wider(Message, frozen=True):
        names: list[Text]

    class Narrower(Message, frozen=True):
        names: list[Name]

    assert fields_of(Renamed) != fields_of(messages.Close)

    class Outer(Message, frozen=True):
        inner: list[Inner]

    before = fields_of(Outer)
    assert fields_of(Wider) != fields_of(Narrower)
    assert before == [["inner", ["list", [["depth", "int", "8"]]], "NODEFAULT"]]


def test_the_bytes_of_a_point_are_these_for_ever() -> None:
    """Users store and send them: another layout gets another magic, and this one is still read."""
    key = codec.PointKey(epoch=bytes(range(16)), slot=7, incarnation=8, generation=9)
    data = bytes.fromhex("6970633107000000000102030405060708090a0b0c0d0e0f0800000000000000090000000000000000000000")
    assert codec.pack(key)[:44] == data
    assert codec.unpack(codec.pack(key)) == key
