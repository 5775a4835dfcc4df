"""All that two programs must read alike in a message, as plain data: what versions are compared by."""

from __future__ import annotations

from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from ipcsync._wire import messages
from ipcsync._wire.messages import Message


def wire() -> list[dict[str, Any]]:
    """Every message by its name."""
    tables = (messages.REQUESTS, messages.REPLIES, {"announcement": messages.Announcement})
    return [{op: fields_of(kind) for op, kind in table.items()} for table in tables]


def fields_of(kind: type[Message]) -> list[Any]:
    """The fields of a message in order, each with its type, that one's own fields and bounds, and its default."""
    hints = get_type_hints(kind, include_extras=True)
    return [[field.name, _type(hints[field.name]), repr(field.default)] for field in msgspec.structs.fields(kind)]


def _type(hint: Any) -> Any:  # noqa: ANN401 - whatever may be written as a type
    """What a field's type is on the wire, whatever Python calls it."""
    if parts := get_args(hint):
        of: Any = get_origin(hint)
        return ["union" if of in (Union, UnionType) else of.__name__, *map(_type, parts)]
    if isinstance(hint, type) and issubclass(hint, Message):
        return fields_of(hint)
    return hint.__name__ if isinstance(hint, type) else repr(hint)  # a bound, or a literal
