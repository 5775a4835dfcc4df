"""The base of all messages, and the two replies that any request may get."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

Name = Annotated[str, Meta(max_length=255)]
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=1024)]


class Message(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The base of all bodies."""


# What a request leaves in the coordinator's journal: nothing; what may be left again; or what must be left once, so
# that its reply is kept with it, for a repetition of the request.
Effect = Literal["none", "repeatable", "once"]


class RequestBody(Message, frozen=True):
    """The base of all requests. One that says nothing of its `effect` must be done once."""

    effect: ClassVar[Effect] = "once"


class Done(Message, frozen=True):
    """The request was done; there is no result."""


class Failure(Message, frozen=True):
    """The request was refused. `kind` is a class name of `ipcsync.errors`, `attributes` its attributes."""

    kind: str
    message: str
    attributes: dict[str, object] = {}
