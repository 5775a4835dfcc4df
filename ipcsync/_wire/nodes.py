"""What a node may be called: a part of a subject and of a certificate, and what users read."""

from __future__ import annotations

import re

MAX_LENGTH = 63
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def why_not(name: object) -> str | None:
    """Why `name` cannot be a node's or a fleet's, None if it can."""
    if isinstance(name, str) and len(name) <= MAX_LENGTH and _NAME.fullmatch(name):
        return None
    return f"is 1 to {MAX_LENGTH} letters, digits, - or _, of which the first is a letter or a digit"
