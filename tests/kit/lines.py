"""Notes which of the product's lines run, in every process of an interpreter; `covered` counts them.

A line is noted when it first runs, in a file that all processes map: so what a process ran that is killed, forks, ends
by `os._exit` or becomes another program counts like what any other ran. A line that is noted costs nothing any more
(sys.monitoring, from Python 3.12 on).

The interpreter runs `START` as it starts, from a file of its site-packages.
"""

from __future__ import annotations

import mmap
import os
import sys

TYPE_CHECKING = False  # typing takes longer to import than all of this
if TYPE_CHECKING:
    from types import CodeType

INDEX, NOTES = "index", "notes"
"""The files of a folder: where each source's lines begin in the notes, and a byte for each line."""

START = "import tests.kit.lines; tests.kit.lines.note({folder!r})\n"
"""What the file in site-packages says."""


def note(folder: str) -> None:
    """Note from now on what runs. Without an index in the folder, and in a second call, nothing happens."""
    monitoring = sys.monitoring  # type: ignore[attr-defined] # mypy reads it as Python 3.10
    tool = monitoring.COVERAGE_ID
    index = os.path.join(folder, INDEX)
    if monitoring.get_tool(tool) is not None or not os.path.exists(index):
        return
    with open(index) as sources:
        begins = {source: int(begin) for begin, source in (line.rstrip("\n").split(" ", 1) for line in sources)}
    with open(os.path.join(folder, NOTES), "r+b") as file:
        if sys.version_info >= (3, 13):
            notes = mmap.mmap(file.fileno(), 0, trackfd=False)  # the tests count descriptors
        else:
            notes = mmap.mmap(file.fileno(), 0)

    def starts(code: CodeType, _: int) -> object:
        if os.path.abspath(code.co_filename) in begins:
            monitoring.set_local_events(tool, code, monitoring.events.LINE)
        return monitoring.DISABLE

    def runs(code: CodeType, line: int) -> object:
        notes[begins[os.path.abspath(code.co_filename)] + line] = 1
        return monitoring.DISABLE

    monitoring.use_tool_id(tool, "lines")
    monitoring.register_callback(tool, monitoring.events.PY_START, starts)
    monitoring.register_callback(tool, monitoring.events.LINE, runs)
    monitoring.set_events(tool, monitoring.events.PY_START)
