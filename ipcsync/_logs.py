"""The daemon's log: one line an event, key=value or JSON, to stderr. Tokens never appear in it.

The values of a message go beside it, in `fields`, not into its text: users choose names, which may hold blanks, quotes
and characters that look like the next pair. Whatever a value holds, it stays one value on one line.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import stat
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,~-]+")
_MOST_TEXTS = 1000
_MOMENT_MS = 100


def fields(**values: object) -> dict[str, object]:
    """The values of a message: `log.info("session opened", extra=fields(name=name))`."""
    return {"fields": values}


def is_round(count: int) -> bool:
    """Whether a repeated occurrence is logged this time: the first, the 10th, the 100th, …"""
    return bool(re.fullmatch("10*", str(count)))


def quoted(value: object) -> str:
    """A value as it is written after `=`: in quotes and escaped if any character in it could end it."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) else printable(json.dumps(text, ensure_ascii=False))


def printable(text: str) -> str:
    """The text with unprintable characters escaped, line separators and direction marks included."""
    return "".join(
        char if char.isprintable() else f"\\u{ord(char):04x}" if char <= "\uffff" else f"\\U{ord(char):08x}"
        for char in text
    )


class Lines(logging.Formatter):
    """`time=… level=… event="…" key=value …`, or one JSON object a line."""

    def __init__(self, *, as_json: bool = False) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """One line, the traceback included."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        parts: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            parts["traceback"] = self.formatException(record.exc_info)
        if self._as_json:
            return json.dumps(parts, default=str)
        return " ".join(f"{key}={quoted(value)}" for key, value in parts.items())


class Seldom(logging.Filter):
    """Lets a warning that comes again and again through the first time, the 10th, the 100th, …, with its count."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[tuple[str, str]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING or record.exc_info:
            return True
        if len(self._counts) >= _MOST_TEXTS:
            self._counts.clear()
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001 - logging tells later of values that its text has no place for
            message = str(record.msg)
        self._counts[record.name, message] += 1
        count = self._counts[record.name, message]
        if count > 1:
            vars(record).update(fields(count=count))
        return is_round(count)


class Unwaiting(logging.Handler):
    """Writes to a descriptor, and never waits for its reader: a line for which there is no room is dropped.

    Else a reader that stopped (a pipe that nobody reads, Ctrl-S in a terminal) would stop the whole service. The next
    line that is written says how many were dropped.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor, mode = descriptor, os.fstat(descriptor).st_mode
        # Of a pipe or a terminal, which the parent has too, another open file that never makes wait.
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            with suppress(OSError):
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                self._descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLOUT)
        self._dropped = 0
        self._is_cut = False  # the last line has no end
        self._patience_ms, self._asked = float(_MOMENT_MS), time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self._has_room():
                self._dropped += 1
                return
            if self._dropped:
                vars(record).update(fields(**getattr(record, "fields", {}), dropped=self._dropped))
            text = f"{chr(10) * self._is_cut}{self.format(record)}\n"
            self._is_cut = not self._write(text.encode(errors="backslashreplace"))
            if not self._is_cut:
                self._dropped = 0
        except BlockingIOError:  # another process's line took the room
            self._dropped += 1
        except Exception:  # noqa: BLE001 - as logging does it
            self.handleError(record)

    def _has_room(self) -> bool:
        """Whether a part of PIPE_BUF bytes is taken at once; a reader that is just slow gets a tenth of the time."""
        began = time.monotonic()
        self._patience_ms = min(_MOMENT_MS, self._patience_ms + 100 * (began - self._asked))
        has_room = bool(self._poll.poll(0 if self._dropped else int(self._patience_ms)))
        self._asked = time.monotonic()
        self._patience_ms = max(0.0, self._patience_ms - 1000 * (self._asked - began))
        return has_room

    def _write(self, data: bytes) -> bool:
        for at in range(0, len(data), select.PIPE_BUF):
            if at and not self._has_room():
                return False
            os.write(self._descriptor, data[at : at + select.PIPE_BUF])
        return True


def _to_stderr() -> logging.Handler:
    try:
        return Unwaiting(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):  # it is no file
        return logging.StreamHandler(sys.stderr)


def configure(level: str, *, as_json: bool, libraries: Sequence[str] = ("asyncio", "py.warnings")) -> None:
    """Send this process's log to stderr: ipcsync's own from `level` up, and the warnings of `libraries`."""
    ours, theirs = _to_stderr(), _to_stderr()
    for handler in (ours, theirs):
        handler.setFormatter(Lines(as_json=as_json))
    theirs.addFilter(Seldom())
    logging.captureWarnings(True)
    for name, handler, least in (("ipcsync", ours, level.upper()), *((name, theirs, "WARNING") for name in libraries)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(least)
