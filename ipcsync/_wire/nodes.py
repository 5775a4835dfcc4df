"""Which names of nodes are valid: a name is part of a NATS subject and of a certificate, and users read it."""

from __future__ import annotations

import re

MAX_LENGTH = 63
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def why_not(name: object) -> str | None:
    """Why `name` is invalid for a node or a fleet; None if it is valid."""
    if isinstance(name, str) and len(name) <= MAX_LENGTH and _NAME.fullmatch(name):
        return None
    return f"is 1 to {MAX_LENGTH} letters, digits, - or _, of which the first is a letter or a digit"
