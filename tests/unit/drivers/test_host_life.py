"""The mark that tells with one load whether an exporter lives, beside the lock that tells it with a system call."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipcsync._linux.robust import OWNER_DIED
from tests.unit.drivers.host_process import HostProcess, own_segment

pytestmark = pytest.mark.process

INVALID_HANDLE = 400
_MARK = "int(process.words[layout.process(process.segment.line) + layout.P_MARK])"
_NO_ROBUST_FUTEXES = "from ipcsync._linux import robust; robust._SYS_SET = -1"
_NO_THREADS = (
    "def refuse(thread): raise RuntimeError('no thread')\n"
    "start_thread = threading.Thread.start; threading.Thread.start = refuse"
)


@pytest.fixture
def segment() -> Iterator[str]:
    with own_segment() as name:
        yield name


def test_the_mark_is_held_from_the_first_exported_event_on(segment: str) -> None:
    with HostProcess(segment) as process:
        process.run("own = d.cuEventCreate(2)")
        assert process.run(_MARK) == 0
        process.run("first = exported(); second = exported()")
        names = "[thread.native_id for thread in threading.enumerate() if thread.name == 'ipcsync-life']"
        (holder,) = process.run(names)
        assert process.run(_MARK) == holder


def _exported(exporter: HostProcess, importer: HostProcess, *, has_mark: bool = True) -> int:
    """Have the importer open an event of the exporter's, which is recorded and complete; the exporter's line."""
    data = exporter.run(
        "event, data = exported(); stream = d.cuStreamCreate(1)[1]; d.cuEventRecord(event, stream); data"
    )
    if has_mark:
        assert 0 < exporter.run(_MARK) < OWNER_DIED
    importer.run(f"event = opened({data!r}); stream = d.cuStreamCreate(1)[1]")
    return int(exporter.run("process.segment.line"))


@pytest.mark.parametrize("fork", ["os.fork()", "ctypes.CDLL(None).fork()"])
def test_a_dead_exporter_whose_child_keeps_its_lock_is_dead(segment: str, fork: str) -> None:
    with HostProcess(segment) as importer, HostProcess(segment) as exporter:
        line = _exported(exporter, importer)
        child = exporter.run(f"child = {fork}\nif child == 0: time.sleep(60); os._exit(0)\nchild")
        try:
            assert importer.run("code(d.cuEventQuery(event))") == 0
            exporter.kill()
            assert importer.run(f"int(process.words[layout.process({line}) + layout.P_MARK])") == OWNER_DIED
            assert importer.run("code(d.cuEventQuery(event))") == INVALID_HANDLE
        finally:
            os.kill(child, signal.SIGKILL)


def test_an_exporter_that_is_still_dying_is_alive_until_all_of_it_is_gone(segment: str) -> None:
    """The mark's thread may be the first to die: an import fails only once a look at the process tells why."""
    with HostProcess(segment) as importer, HostProcess(segment) as exporter:
        line = _exported(exporter, importer)
        exporter.run(f"process.segment.words[layout.process({line}) + layout.P_MARK] = {OWNER_DIED}")
        uses = "[code(d.cuEventQuery(event)), code(d.cuEventRecord(event, stream))]"
        assert importer.run(uses) == [0, 0]
        exporter.kill()
        assert importer.run(uses) == [INVALID_HANDLE] * 2


@pytest.mark.parametrize("missing", [_NO_ROBUST_FUTEXES, _NO_THREADS])
@pytest.mark.parametrize("end", ["kill", "finish"])
def test_without_a_mark_the_lock_tells(segment: str, missing: str, end: str) -> None:
    with HostProcess(segment) as importer, HostProcess(segment) as exporter:
        exporter.run(missing)
        line = _exported(exporter, importer, has_mark=False)
        assert importer.run(f"int(process.words[layout.process({line}) + layout.P_MARK])") == 0
        uses = "[code(d.cuEventQuery(event)), code(d.cuEventRecord(event, stream))]"
        assert importer.run(uses) == [0, 0]
        getattr(exporter, end)()
        assert importer.run(uses) == [INVALID_HANDLE] * 2


def test_who_leaves_releases_its_mark(segment: str) -> None:
    """Else the kernel would write to it when the process ends, and by then the line may be another's."""
    with HostProcess(segment) as importer, HostProcess(segment) as exporter:
        line = _exported(exporter, importer)
        exporter.run("from ipcsync._drivers.host.init import _leave; _leave()")
        assert importer.run(f"int(process.words[layout.process({line}) + layout.P_MARK])") == 0
        assert importer.run("code(d.cuEventQuery(event))") == INVALID_HANDLE


def test_the_mark_of_who_has_the_line_next_tells_nothing_of_the_last(segment: str) -> None:
    with HostProcess(segment) as importer, HostProcess(segment) as exporter:
        line = _exported(exporter, importer)
        exporter.kill()
        with HostProcess(segment) as third:
            assert third.run("process.segment.line") == line
            assert third.run(_MARK) == 0
            third.run("event, data = exported()")
            assert 0 < third.run(_MARK) < OWNER_DIED
            assert importer.run("code(d.cuEventQuery(event))") == INVALID_HANDLE


# Reads the words of the segment, and stops behind the first read of one of them until a file is removed.
_STOPPING = """
import pathlib
class Stopping:
    def __init__(self, words, index, path):
        self.words, self.index, self.path = words, index, pathlib.Path(path)
    def __getitem__(self, index):
        value = self.words[index]
        if index == self.index and self.path is not None:
            path, self.path = self.path, None
            path.touch()
            while path.exists(): time.sleep(0.001)
        return value
"""


@pytest.mark.parametrize("behind", ["E_LATEST", "P_MARK"])
def test_an_exporter_that_dies_and_is_followed_within_the_look_is_dead(
    segment: str, tmp_path: Path, behind: str
) -> None:
    stop = tmp_path / "stop"
    with HostProcess(segment) as importer, HostProcess(segment) as exporter:
        line = _exported(exporter, importer)
        base = "find_event(event).line" if behind == "E_LATEST" else f"layout.process({line})"
        importer.run("from ipcsync._drivers.host.event import find_event\n" + _STOPPING)
        importer.run(f"real = process.words; process.words = Stopping(real, {base} + layout.{behind}, {str(stop)!r})")
        importer.tell("code(d.cuEventQuery(event))")
        deadline = time.monotonic() + 20
        while not stop.exists():
            assert time.monotonic() < deadline, "the look does not read this word"
        exporter.kill()
        with HostProcess(segment) as third:
            assert third.run("process.segment.line") == line
            third.run("event, data = exported()")
            stop.unlink()
            assert importer.answer() == INVALID_HANDLE
        importer.run("process.words = real")
