"""The daemon's log: one line an event, key=value or JSON, to stderr. Tokens never appear in it.

The values of a message go beside it, in `fields`, not into its text: users choose names, which may hold blanks, quotes
and characters that look like the next pair. Whatever a value holds, it stays one value on one line.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence

_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,~-]+")
_MOST_TEXTS = 1000
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def fields(**values: object) -> dict[str, object]:
    """The values of a message: `log.info("session opened", extra=fields(name=name))`."""
    return {"fields": values}


def is_round(count: int) -> bool:
    """Whether a repeated occurrence is logged this time: the first, the 10th, the 100th, …"""
    return bool(re.fullmatch("10*", str(count)))


def quoted(value: object) -> str:
    """A value as it is written after `=`: in quotes and escaped if any character in it could end it."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if _PLAIN.fullmatch(text):
        return text
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(char: str) -> str:
    if char.isprintable():
        return _ESCAPES.get(char, char)
    return _ESCAPES.get(char) or _code(char)


def _code(char: str) -> str:
    code = ord(char)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def printable(text: str) -> str:
    """The text with unprintable characters escaped, so that a terminal shows it on one line.

    Line separators and direction marks count as unprintable.
    """
    return text if text.isprintable() else "".join(char if char.isprintable() else _code(char) for char in text)


def _parts(record: logging.LogRecord, formatter: logging.Formatter) -> dict[str, object]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    parts: dict[str, object] = {
        "time": f"{stamp}.{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
        "event": record.getMessage(),
    }
    parts.update(getattr(record, "fields", {}))
    if record.exc_info:
        parts["traceback"] = formatter.formatException(record.exc_info)
    return parts


class KeyValue(logging.Formatter):
    """`time=… level=… event="…" key=value …`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, the traceback included."""
        return " ".join(f"{key}={quoted(value)}" for key, value in _parts(record, self).items())


class Json(logging.Formatter):
    """One JSON object a line: time, level, event, and the message's values."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, the traceback included."""
        return json.dumps(_parts(record, self), default=str)


def _message_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - as logging does with values that its text has no place for: it tells of them later
        return str(record.msg)


class Seldom(logging.Filter):
    """Lets a warning that comes again and again through the first time, the 10th, the 100th, …, with its count.

    asyncio warns at each attempt of a connection over TLS, for instance, and those may be twenty a second.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[tuple[str, str]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is logged this time."""
        if record.levelno != logging.WARNING or record.exc_info:
            return True
        if len(self._counts) >= _MOST_TEXTS:
            self._counts.clear()
        text = record.name, _message_of(record)
        self._counts[text] += 1
        count = self._counts[text]
        if count > 1:
            vars(record).update(fields(count=count))
        return is_round(count)


def configure(level: str, *, as_json: bool, libraries: Sequence[str] = ("asyncio", "py.warnings")) -> None:
    """Send this process's log to stderr: ipcsync's own from `level` up, and the warnings of `libraries`."""
    ours, theirs = logging.StreamHandler(sys.stderr), logging.StreamHandler(sys.stderr)
    for handler in (ours, theirs):
        handler.setFormatter(Json() if as_json else KeyValue())
    theirs.addFilter(Seldom())
    logging.captureWarnings(True)
    for name, handler, least in (("ipcsync", ours, level.upper()), *((name, theirs, "WARNING") for name in libraries)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(least)
