"""Rows on which CUDA promises nothing: tests ask, write the answer down, and accept every answer a driver may give.

With IPCSYNC_PROBE_OUT=PATH one JSON line a row is appended to PATH; `python -m tests.gpu.probe_report` makes a table
of them.
"""

from __future__ import annotations

import datetime
import json
import os

from ipcsync._drivers import load, name, unwrap
from tests.kit import driver_kit as kit


def write_down(row: str, answer: str) -> None:
    """Append the driver's answer to the file that IPCSYNC_PROBE_OUT names; without it do nothing."""
    path = os.environ.get("IPCSYNC_PROBE_OUT")
    if not path:
        return
    line = {
        "row": row,
        "answer": answer,
        "driver": name(),
        "kind": kit.driver_kind(),
        "device": kit.device_name(),
        "version": int(unwrap(load().cuDriverGetVersion(), "cuDriverGetVersion")),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line, sort_keys=True) + "\n")


def say(code: int) -> str:
    """A result code with its name."""
    result = load().CUresult(code)
    return f"{result.name} ({code})"
