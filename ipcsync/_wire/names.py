"""Which names are valid."""

from __future__ import annotations

import re

MAX_BYTES = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_MAX_NODE = 63
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def why_not(name: str, limit: int = MAX_BYTES) -> str | None:
    """Why `name` is invalid for an event or stream; None if it is valid.

    It has 1 to 255 bytes of UTF-8, no control character, and no empty, `.` or `..` segment between slashes.
    """
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        return "is not UTF-8"
    if not 1 <= length <= limit:
        return f"has {length} bytes, but 1 to {limit} are allowed"
    if _CONTROL.search(name):
        return "has a control character"
    if any(segment in ("", ".", "..") for segment in name.split("/")):
        return "has an empty, '.' or '..' segment"
    return None


def why_not_node(name: object) -> str | None:
    """Why `name` is invalid for a node or a fleet (NATS subjects and certificates have it); None if it is valid."""
    if isinstance(name, str) and len(name) <= _MAX_NODE and _NODE.fullmatch(name):
        return None
    return f"is 1 to {_MAX_NODE} letters, digits, - or _, of which the first is a letter or a digit"


def plain(text: str, what: str = "a name") -> str:
    """The text as a plain str: subclasses of str (of numpy, enum or a user) cannot be sent."""
    if not isinstance(text, str):
        raise TypeError(f"{what} is a str, but got {type(text).__name__}")
    return str.__str__(text)
