"""The compiled core over a real board, with a driver of callbacks; each step that it takes is written down."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ipcsync._engines.chains import Entry
from ipcsync._engines.queued_wait import Wait

from ipcsync._board import INT64_MAX, LIVE, OPEN, Board
from ipcsync._engines import compiled
from ipcsync._engines.compiled import Links
from ipcsync._linux.fork import ForkMark
from tests.faults.board_world import MAX
from tests.kit import boards

SOURCE = Path(compiled.__file__).with_name("core_cython") / "core.pyx"
STREAM = 4096
MARKER = 77
_NOT_READY = 600
_SESSION = 1  # the recorder's line; this process's is 0
_INT, _POINTER, _WIDE = ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventQuery": (_POINTER,),
    "cuStreamWaitEvent": (_POINTER, _POINTER, _INT),
    "cuStreamIsCapturing": (_POINTER, ctypes.POINTER(_INT)),
    "cuStreamGetId": (_POINTER, ctypes.POINTER(_WIDE)),
    "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(_INT),),
    "cuStreamWriteValue64": (_POINTER, _WIDE, _WIDE, _INT),
    "cuStreamWaitValue64": (_POINTER, _WIDE, _WIDE, _INT),
    "cuEventSynchronize": (_POINTER,),
    "cuCtxGetCurrent": (_POINTER,),
    "cuCtxSetCurrent": (_POINTER,),
}


def built(translated: Path, mistake: int) -> Any:
    """The core with a planted mistake, built from its translation into C, and imported."""
    folder = translated.parent / str(mistake)
    folder.mkdir(exist_ok=True)
    headers = [f"-I{sysconfig.get_paths()['include']}", f"-I{SOURCE.parent}"]
    command = ["cc", "-O0", "-w", "-fPIC", "-shared", f"-DMISTAKE={mistake}", *headers]
    subprocess.run([*command, str(translated), "-o", str(folder / "core.so")], check=True)
    spec = importlib.util.spec_from_file_location("core", folder / "core.so")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NotMeError(Exception):
    """The shortcut left the call to the Python engine."""


class QueuedError(Exception):
    """The wait was queued, and what the looks behind it found is for the Python engine to say."""


class NotOpenError(Exception):
    """The record was made, on an event that is not open any more."""


class RefusedError(Exception):
    """The driver refused what a stream may have: its code and function, and the stream that is without a marker."""


class Rig:
    """One slot of a board, one core over it, one driver."""

    def __init__(self, core: ModuleType, directory: Path, case: Any) -> None:
        self.core, self.case = core, case
        self.log: list[str] = []
        self.on_wait: Callable[[], int] = lambda: 0  # within the driver's call
        self.results: dict[str, int] = {}  # of the driver's functions that are refused
        self.asked: list[str] = []  # the driver's functions, as they were called
        self.mode = 0  # the thread's capture mode
        self.waits: dict[int, dict[int, Wait]] = {}
        self.dropped: list[Wait] = []
        self.chain: Any = SimpleNamespace(_entries=[], _loss=None, _is_holder=True, judge_at=16)
        self.board = Board.create(str(directory / "board"), b"e" * 16, 3, 2)
        self.board.has_mark = True
        self.line = self.board.slot(0)
        self.mark = ForkMark()
        own, recorder = self.board.session(0), self.board.session(_SESSION)
        own.assign(1 << 16, 1, 1, 1, 1)
        recorder.assign(1 << 16 | _SESSION, 1, 1, 1, 1)
        self.board.words[recorder.indices[1]] = 1 if case.is_alive else 0x4000_0001
        self.put("incarnation", 1)
        self.put("awaited", int(case.is_awaited))
        self.put("visited", int(case.is_visited))
        self.line._visits[_SESSION] = int(bool(case.visitor))
        self.put("recorder", 1 << 16 | _SESSION)
        for name in ("recorded", "completed", "state", "watermark"):
            self.put(name, getattr(case, name))
        self.session_check = core.SessionCheck(self.mark, self.board, own, 1 << 16, LIVE, self._slowly)
        self.session_check.good_until = INT64_MAX
        self._functions = [ctypes.CFUNCTYPE(_INT, *kinds)(self._called(name)) for name, kinds in _SIGNATURES.items()]
        self._hook = ctypes.CFUNCTYPE(None, _INT)(self.step)
        self.links = Links(self.waits, [], core.Lock(), self.dropped.extend, Wait, self.chain, Entry, behind_all=False)
        self.engine = self._engine()

    def _engine(self) -> Any:
        rig, case = self, self.case

        class Engine(rig.core.Core):  # type: ignore[misc,name-defined] # either build of it
            line = rig.line

            def _raise_no_record(self) -> None:
                raise NotOpenError

            def _raise_refused(self, *refused: object) -> None:
                unmarked = (int(getattr(self, "_unmarked")), self._unmarked_id)  # noqa: B009 - mypy has no type of it
                self._unmarked = 0
                raise RefusedError(*refused, *unmarked)

            def _note_wait(self, stream_id: int, key: int, generation: int) -> Wait:
                return Wait(self, generation, key, stream_id)

            def _check_after_wait(self, _generation: int) -> None:
                raise QueuedError

            def synchronize(self, *_: Any) -> None:
                raise NotMeError

        engine = Engine()
        engine.incarnation, engine.base, engine.depth = 1, 0, case.depth
        engine.is_recorder = case.call in ("record", "harvest")
        engine.is_closed = case.is_closed
        engine._recorded = engine._begun = case.made
        engine._completed, engine._room = case.done, case.done + case.depth
        engine._lost_from = 1 << 62
        engine._lock, engine._record_lock = rig.core.Lock(), rig.core.Lock()
        engine._address = 1
        addresses = [ctypes.cast(function, _POINTER).value for function in self._functions]
        rig.core.bind_functions(dict(zip(_SIGNATURES, addresses, strict=True)))
        engine.shorten(rig.session_check, case.engine == "timeline", rig.links)
        for index in range(case.depth):
            engine._keep_event(index, index + 1)
        engine._last_stream = case.stream
        engine._last_stream = 1
        engine._last_key = (case.stream, case.stream)
        engine.keep_marker(case.stream, MARKER)
        return engine

    def put(self, name: str, value: int) -> None:
        """Somebody stores a word."""
        names = ["incarnation", "state", "recorder", "watermark", "", "", "awaited", "followed"]
        names += ["recorded", "completed", "", "", "", "", "visited"]
        first = (self.line.address - self.board.address) // 8
        self.board.words[first + names.index(name)] = INT64_MAX if value == MAX else value

    def word(self, name: str) -> int:
        """What stands there."""
        return int(getattr(self.line, name))

    def close(self) -> None:
        """Remove the board."""
        self.core.set_hook(0)
        boards.end(self.board)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Steps are written down."""
        self.core.set_hook(ctypes.cast(self._hook, _POINTER).value)
        try:
            yield
        finally:
            self.core.set_hook(0)

    def step(self, number: int) -> None:
        """One step is about to be taken."""
        if self.case.is_orphaned and self.log[-1:] in (
            [["cuStreamGetId"]] if self.case.is_queued else [["guard.check"], ["lock"]]
        ):
            self.board.words[7] = 0x4000_0001  # the header's owner
        self.log.append(self.core.STEPS[number])
        if self.log[-1] == "sleep":
            for name, value in self.case.meanwhile.items():
                self.put(name, value)
        if self.log[-2:-1] == ["enter"]:
            for name, value in self.case.at_enter.items():
                self.put(name, value)

    def _slowly(self) -> None:
        raise NotMeError

    def call(self) -> tuple[list[str], str]:
        """The steps of the case's call by its shortcut, and how it ended."""
        point = _point_of(self.core)(SimpleNamespace(engine=self.engine), self.case.generation)
        calls: dict[str, Callable[[], Any]] = {
            "query": point.query,
            "synchronize": lambda: point.synchronize() or "ok",
            "wait": lambda: point.wait(STREAM) or "ok",
            "record": lambda: self.event.record(STREAM) and "",
        }
        with self.hooked():
            try:
                outcome = str(calls[self.case.call]())
            except (NotMeError, QueuedError, NotOpenError) as error:
                outcome = type(error).__name__
            except RefusedError as error:
                outcome = str(error)
        return self.log, outcome

    @property
    def event(self) -> Any:
        """A shared event over the core, of which only `record` is there."""

        class Event(self.core.EventBase):  # type: ignore[misc,name-defined] # either build of it
            def _slow_record(self, *_: Any, **__: Any) -> None:
                raise NotMeError

        event = Event()
        event._attached, event._engine, event._point_type = None, self.engine, self.core.PointBase
        event._is_open = event._is_recorder = True
        return event

    # The driver.

    def _called(self, name: str) -> Callable[..., int]:
        """The driver's function of that name. If it is refused, it has written its answers all the same."""

        def call(*args: Any) -> int:
            self.asked.append(name)
            result: int = getattr(self, name)(*args)
            return self.results.get(name, result)

        return call

    def cuEventRecord(self, _event: int, _stream: int) -> int:  # noqa: N802 - the driver's name
        return 0

    def cuEventQuery(self, _event: int) -> int:  # noqa: N802 - the driver's name
        return 0 if self.case.says_complete else _NOT_READY

    def cuStreamWaitEvent(self, *_: Any) -> int:  # noqa: N802 - the driver's name
        return self.on_wait()

    def cuStreamWriteValue64(self, *_: Any) -> int:  # noqa: N802 - the driver's name
        return 0

    def cuStreamWaitValue64(self, *_: Any) -> int:  # noqa: N802 - the driver's name
        return 0

    def cuStreamIsCapturing(self, _stream: int, status: Any) -> int:  # noqa: N802 - the driver's name
        status[0] = 0
        return 0

    def cuStreamGetId(self, _stream: int, stream_id: Any) -> int:  # noqa: N802 - the driver's name
        stream_id[0] = self.case.stream
        return 0

    def cuEventSynchronize(self, _event: int) -> int:  # noqa: N802 - the driver's name
        return 0

    def cuCtxGetCurrent(self, _context: int) -> int:  # noqa: N802 - the driver's name
        return 0

    def cuCtxSetCurrent(self, _context: int) -> int:  # noqa: N802 - the driver's name
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802 - the driver's name
        self.mode, mode[0] = mode[0], self.mode
        return 0


def end(core: ModuleType, rigs: Iterable[Rig]) -> None:
    """Close the rigs, and have the core call the process's own driver again."""
    for rig in rigs:
        rig.close()
    core.bind_functions({})
    compiled.bind_driver()


def _point_of(core: ModuleType) -> Any:
    class Point(core.PointBase):  # type: ignore[misc,name-defined] # either build of it
        def _slow(self, *_: Any, **__: Any) -> None:
            raise NotMeError

        _slow_wait = _slow_query = _slow_synchronize = _slow

    return Point


assert OPEN == 1
