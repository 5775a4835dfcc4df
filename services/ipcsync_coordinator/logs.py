"""The daemon's log: one line an event, key=value or JSON, to stderr. Tokens never appear in it."""

from __future__ import annotations

import json
import logging
import re
import sys
import time

from ipcsync_coordinator.config import Settings

_PAIR = re.compile(r"(\w+)=(\"[^\"]*\"|\S*)")


class KeyValue(logging.Formatter):
    """`time=… level=… msg="…" key=value …`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; an exception's traceback follows on lines of its own."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = f"{stamp}.{int(record.msecs):03d}Z {record.levelname.lower()} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class Json(logging.Formatter):
    """One JSON object a line: time, level, event, and the message's pairs."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, the traceback included."""
        message = record.getMessage()
        fields: dict[str, object] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "event": _PAIR.split(message)[0].strip(),
        }
        fields.update({key: value.strip('"') for key, value in _PAIR.findall(message)})
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure(settings: Settings) -> None:
    """Send the daemon's log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if settings.log_json else KeyValue())
    root = logging.getLogger("ipcsync")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(settings.log_level.upper())
