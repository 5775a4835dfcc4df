"""What a name may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipcsync._wire.names import MAX_BYTES, why_not
from tests.kit.examples import examples


@pytest.mark.parametrize(
    "name", ["a", "x" * 255, "é" * 127, "a/b/c", "..a", "a..", ".a/b.", "...", "a b", "層/7", "a:b*?", "\\"]
)
def test_good_names(name: str) -> None:
    assert why_not(name) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "0 bytes"),
        ("x" * 256, "256 bytes"),
        ("é" * 128, "256 bytes"),
        ("x" * 10_000, "10000 bytes"),
        ("a\x00b", "control"),
        ("a\n", "control"),
        ("\x1b[0m", "control"),
        ("\x7f", "control"),
        ("\x85", "control"),
        ("/", "segment"),
        ("/a", "segment"),
        ("a/", "segment"),
        ("a//b", "segment"),
        (".", "segment"),
        ("..", "segment"),
        ("a/../b", "segment"),
        ("a/.", "segment"),
        ("\ud800", "UTF-8"),
    ],
)
def test_bad_names_say_why(name: str, why: str) -> None:
    assert why in (why_not(name) or "")


def test_the_limit_is_in_bytes_and_can_be_lower() -> None:
    assert why_not("éé", 4) is None
    assert why_not("éé", 3) is not None


@examples(300)
@given(st.text(max_size=300))
def test_a_good_name_is_short_plain_and_has_no_way_up(name: str) -> None:
    if why_not(name) is None:
        assert 1 <= len(name.encode()) <= MAX_BYTES
        assert name.isprintable() or not any(ord(char) < 32 for char in name)
        assert not {"", ".", ".."} & set(name.split("/"))
