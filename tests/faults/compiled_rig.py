"""The compiled core over a real board, with a driver of callbacks; each step that it takes is written down."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest

from ipcsync import errors
from ipcsync._board import INT64_MAX, OPEN, Board
from ipcsync._board.layout import SessionLine
from ipcsync._engines import core as _core
from ipcsync._engines.loss import Loss
from ipcsync._linux.process import ForkMark
from ipcsync._wire.messages import Attachment
from ipcsync.typing import EngineName
from tests.kit import boards
from tests.models.board_world import MAX

core: Any = _core
SOURCE = Path(core.__file__).with_name("core_cython") / "core.pyx"
NOT_READY = 600  # CUDA_ERROR_NOT_READY
STREAM = 4096  # a handle; its id is the case's
DIED = 0x4000_0000  # what the kernel adds to the word that a thread held
OTHERS, MINE, THIRD = 1 << 16, 1 << 16 | 1, 1 << 16 | 2  # serials: a waiter, who records, one more
_INT, _POINTER, _WIDE = ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventQuery": (_POINTER,),
    "cuEventCreate": (ctypes.POINTER(_POINTER), _INT),
    "cuEventDestroy": (_POINTER,),
    "cuStreamGetFlags": (_POINTER, ctypes.POINTER(_INT)),
    "cuStreamWaitEvent": (_POINTER, _POINTER, _INT),
    "cuStreamIsCapturing": (_POINTER, ctypes.POINTER(_INT)),
    "cuStreamGetId": (_POINTER, ctypes.POINTER(_WIDE)),
    "cuStreamGetCtx": (_POINTER, _POINTER),
    "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(_INT),),
    "cuStreamWriteValue64": (_POINTER, _WIDE, _WIDE, _INT),
    "cuStreamWaitValue64": (_POINTER, _WIDE, _WIDE, _INT),
    "cuStreamBatchMemOp": (_POINTER, _INT, _POINTER, _INT),
    "cuCtxGetCurrent": (_POINTER,),
    "cuCtxSetCurrent": (_POINTER,),
}


@dataclass(frozen=True)
class Case:
    """One call, and what it finds."""

    call: str
    engine: EngineName = "event"
    generation: int = 1
    depth: int = 1
    recorded: int = 0
    completed: int = 0
    state: int = OPEN
    watermark: int = 0
    says_complete: bool = False  # the driver, of what was recorded
    is_alive: bool = True  # the recorder
    is_orphaned: bool = False  # the coordinator dies in the middle of the call
    is_closed: bool = False  # here, by another thread
    is_awaited: bool = False  # somebody has slept until a record
    is_announced: bool = False  # somebody has queued a wait on a stream
    announcer: str = ""  # who is about to: one that "leaves" during the pause, or is "dead"
    at_announce: dict[str, Any] = field(default_factory=dict)  # stored on the board when a hazard has begun
    made: int = 0  # by the recorder, on stream 1; none is known complete
    stream: int = 1
    meanwhile: dict[str, Any] = field(default_factory=dict)  # stored on the board while it sleeps

    @property
    def is_recorder(self) -> bool:
        """Whether the call is the recorder's."""
        return self.call in ("record", "harvest", "let go")

    @property
    def orphans_at(self) -> str:
        """The step behind which the coordinator dies: after the looks before, or once the driver was asked."""
        return "cuStreamGetId" if self.call == "wait" and not self.says_complete else "cuEventQuery"


Changes = Sequence[tuple[str, str]]
"""Parts of the core's source, each of which stands there once, and what takes its place."""


def planted(folder: Path, changes: Changes) -> Path:
    """A copy of the core's source with these changes."""
    copy = shutil.copytree(SOURCE.parent, folder / "source")
    for before, after in changes:
        (place,) = [path for path in copy.iterdir() if before in path.read_text()]
        text = place.read_text()
        assert text.count(before) == 1
        place.write_text(text.replace(before, after))
    return copy


def built(folder: Path, changes: Changes = ()) -> Any:
    """The core with a mistake planted by these changes, built in a folder of its own, and imported."""
    pytest.importorskip("Cython", reason="Cython is not here")
    if shutil.which("cc") is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("there is no C compiler, or no headers of Python's")
    source, translated = planted(folder, changes), folder / "core.c"
    cython = [sys.executable, "-m", "cython", "-3", "--module-name", "core"]
    subprocess.run([*cython, str(source / SOURCE.name), "-o", str(translated)], check=True)
    headers = [f"-I{sysconfig.get_paths()['include']}", f"-I{source}"]
    command = ["cc", "-O0", "-w", "-fPIC", "-shared", *headers]
    subprocess.run([*command, str(translated), "-o", str(folder / "core.so")], check=True)
    spec = importlib.util.spec_from_file_location("core", folder / "core.so")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Guard:
    """A session's part in the calls."""

    depends_on_all = False
    full_rings = 0

    def __init__(self, rig: Rig, session_check: Any) -> None:
        self._rig, self.session_check = rig, session_check
        self.line_index = int(rig.case.is_recorder)

    def coordinator_is_alive(self) -> bool:
        return not self._rig.is_orphaned

    def check_liveness(self) -> None:
        self._rig.log.append("guard.check_liveness")
        if self._rig.is_orphaned or not self.session_check.good_until:
            self._rig.slowly()


def _raiser(kind: type[Exception]) -> Callable[..., NoReturn]:
    def raise_it(*_: object) -> NoReturn:
        raise kind("whose text is Python's")

    return raise_it


def engine_of(module: ModuleType) -> Any:
    """What is made over a build of the core: errors without texts, and handles that nobody exported."""

    class Engine(module.Core):  # type: ignore[misc,name-defined] # either build of it
        label = "e"
        rig: Rig

        raise_closed = _raiser(errors.EventClosed)
        raise_lost = _raiser(errors.RecorderLost)
        raise_timeout = raise_full = _raiser(errors.WaitTimeout)
        raise_reentered = _raiser(errors.Reentered)
        raise_unknown_place = _raiser(errors.IpcSyncError)
        refuse_capturing = _raiser(errors.StreamCapturing)

        def raise_driver(self, code: int, call: str) -> NoReturn:
            raise errors.DriverError(f"{call}: {code}", code=code, call=call)

        def raise_no_record(self) -> NoReturn:
            self.check()
            raise errors.RecorderLost if self.chain.loss is not None else errors.EventClosed

        def loss_of(self, _generation: int) -> Loss:
            return Loss("died", self.line.recorder, "r", 7)

        def note_full(self, *_: object) -> None:
            """Nobody reads it."""

        log_nobody = note_full

        def peer_is_alive(self, serial: int) -> bool:  # asks the kernel what the line does not say
            if self.rig.log[-1:] != ["recorder alive?"]:
                self.rig.log.append("recorder alive?")
            return self.rig.lives(serial & 0xFFFF)

        def session_is_alive(self, line: int) -> bool:
            self.rig.log.append("announcer alive?")
            return self.rig.lives(line)

        def open_event(self, index: int) -> int:
            return self.rig.handle or index + 1

        def open_word(self) -> int:
            return 1

        def create_event(self, _stream: int, _ordinal: int) -> int:
            return self.rig.handle or 77

    return Engine


class Rig:
    """One slot of a board, which session 1 records, and one engine over it."""

    is_users = False  # the calls are made as users make them

    def __init__(self, case: Case, directory: Path, module: ModuleType = core, handle: int = 0) -> None:
        self.core, self.case = module, case
        self.handle = handle  # of each CUDA event of the ring, if not 0
        self.stream_handle = STREAM
        self.log: list[str] = []
        self.is_orphaned = False
        self.results: dict[str, int] = {}  # of the driver's functions that are refused
        self.asked: list[str] = []  # the driver's functions, as they were called
        self.within: dict[str, Callable[[], object]] = {}  # what is done within a function of the driver
        self.mode = 0  # the thread's capture mode
        self.stream, self.flags = case.stream, 1  # CU_STREAM_NON_BLOCKING
        self.board = Board.create(str(directory / "board"), b"e" * 16, 3, 2)
        self.board.has_mark = True
        self.line = self.board.slot(0)
        for index in range(3):
            self.board.session(index).assign(1 << 16 | index, 1, 1, 1, 1)
            self.hold(self.board.session(index), 0x77)
        self.put("incarnation", 1)
        self.put("state", OPEN)
        self.put("recorder", MINE)
        own = self.board.session(int(case.is_recorder))
        self._mark = ForkMark()
        self.session_check = module.SessionCheck(self._mark, self.board, own, own.serial, self.slowly)
        self.session_check.good_until = INT64_MAX
        self.guard = Guard(self, self.session_check)
        self.functions = {
            name: ctypes.CFUNCTYPE(_INT, *kinds)(partial(self._called, name)) for name, kinds in SIGNATURES.items()
        }
        self._hook = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self.step)
        self.bind()
        self.engine = self._engine()
        self._find()

    def bind(self, **addresses: int) -> None:
        """Have the core call this rig's functions, but for those."""
        own = {name: ctypes.cast(function, _POINTER).value for name, function in self.functions.items()}
        self.core.bind_functions({**own, **addresses})

    def made(self, slot: int, *, recorder: bool) -> Any:
        """An engine for a slot."""
        case = self.case
        names = {"device": "", "handles": [b""] * case.depth}
        attachment = Attachment("e", slot, 1, 0, engine=case.engine, depth=case.depth, recorder=recorder, **names)  # type: ignore[arg-type]
        engine = engine_of(self.core)(self.board, self.guard, attachment, 0)
        engine.rig = self
        return engine

    def _engine(self) -> Any:
        """One that has recorded before, so that its handles are open and its streams have markers."""
        case, engine = self.case, self.made(0, recorder=self.case.is_recorder)
        if case.is_recorder:
            for self.stream in (case.stream, 1):
                for engine._recorded in range(max(case.made, 1)):
                    engine._begun = engine._recorded
                    engine.record_next(STREAM, INT64_MAX, None, None)
            engine._recorded = engine._begun = case.made
        elif case.call in ("wait", "ahead"):
            self.put("recorded", 1)
            self.results["cuEventQuery"] = NOT_READY
            engine.queue(STREAM, 0, 1, None, False, 0)
            self.core.drop(self.core.of(None))
            self.results.clear()
        self.stream = case.stream
        for generation in range(1, case.depth + 1):
            engine.open_first(generation)
        engine.is_closed = case.is_closed
        return engine

    def _find(self) -> None:
        """Store what the call finds."""
        case = self.case
        for name in ("recorded", "completed", "state", "watermark"):
            self.put(name, getattr(case, name))
        self.put("awaited", int(case.is_awaited))
        self.put("announced", int(case.is_announced))
        self.line._hazards[2] = int(bool(case.announcer))
        if case.announcer == "dead":
            self.hold(self.board.session(2), DIED)
        if not case.is_alive:
            self.hold(self.board.session(1), DIED)
        self.log.clear()
        self.asked.clear()

    def put(self, name: str, value: int) -> None:
        """Somebody stores a word."""
        names = ["incarnation", "state", "recorder", "watermark", "", "", "awaited", "followed"]
        names += ["recorded", "completed", "", "", "", "", "announced"]
        first = (self.line.address - self.board.address) // 8
        self.board.words[first + names.index(name)] = INT64_MAX if value == MAX else value

    def word(self, name: str) -> int:
        """What stands there."""
        return int(getattr(self.line, name))

    def hold(self, line: SessionLine, owner: int) -> None:
        """A thread holds the session's word, or the kernel has marked it."""
        line.owner = owner

    def lives(self, line: int) -> bool:
        return not self.board.session(line).owner & DIED

    def orphan(self) -> None:
        """The coordinator dies."""
        self.is_orphaned = True
        self.board.words[7] = DIED  # the header's owner

    def slowly(self) -> None:
        raise errors.CoordinatorLost("") if self.is_orphaned else errors.SessionExpired("")

    def close(self) -> None:
        """Remove the board."""
        self.core.set_hook(0)
        boards.end(self.board)

    # --- the call -----------------------------------------------------------------------------------------------------

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Steps are written down."""
        self.core.set_hook(ctypes.cast(self._hook, _POINTER).value)
        try:
            yield
        finally:
            self.core.set_hook(0)

    def step(self, name: bytes) -> None:
        """One step is about to be taken."""
        case, last = self.case, self.log[-1] if self.log else ""
        if case.is_orphaned and last == case.orphans_at:
            self.orphan()
        happens = case.at_announce if last == "announce" else {}
        self.log.append(name.decode())
        if self.log[-1] == "sleep":
            happens = case.meanwhile
        if case.announcer == "leaves" and self.log.count("guard.check") == 2:  # behind the first pause
            self.line._hazards[2] = 2
        for word, value in happens.items():
            self.put(word, value)

    def call(self) -> tuple[list[str], str]:
        """The steps of the case's call, and how it ended: its result, or the name of its error."""
        engine, generation = self.engine, self.case.generation
        point = self.point() if self.is_users else None
        calls: dict[str, Callable[[], Any]] = {
            "query": point.query if point else lambda: engine.query(generation),
            "synchronize": lambda: (point.synchronize() if point else engine.synchronize(generation)) or "ok",
            "wait": lambda: (point.wait(self.stream_handle) if point else self._wait(ahead=False)) or "ok",
            "ahead": lambda: self._wait(ahead=True) or "ok",
            "record": (lambda: self.event.record(self.stream_handle) and "")
            if self.is_users
            else lambda: self._record() or "",
            "harvest": lambda: engine.publish_completed() or "",
            "let go": engine.try_release,
        }
        with self.hooked():
            try:
                outcome = str(calls[self.case.call]())
            except errors.IpcSyncError as error:
                outcome = f"{type(error).__name__} {getattr(error, 'call', '')}".strip()
        return self.log, outcome

    def _wait(self, *, ahead: bool) -> str:
        self.engine.check()
        self.engine.queue(self.stream_handle, 0, self.case.generation, None, ahead, 0)
        return ""

    def _record(self) -> str:
        self.engine.check()
        self.engine.record_next(self.stream_handle, INT64_MAX, None, None)
        return ""

    def point(self) -> Any:
        """A point over the engine, of which only what is the core's is there."""
        return self.core.PointBase(SimpleNamespace(engine=self.engine), self.case.generation)

    @property
    def event(self) -> Any:
        """A shared event over the engine, of which only `record` is there."""
        event = self.core.EventBase()
        event._attached, event._point_type = SimpleNamespace(engine=self.engine), self.core.PointBase
        event._is_open = event._is_recorder = True
        return event

    # --- the driver ---------------------------------------------------------------------------------------------------

    def _called(self, name: str, *args: Any) -> int:
        """A function of the driver. If it is refused, it has written its answers all the same."""
        self.asked.append(name)
        self.within.get(name, lambda: None)()
        result = 0
        if name == "cuEventQuery":
            result = 0 if self.case.says_complete else NOT_READY
        elif name == "cuStreamIsCapturing":
            args[1][0] = 0
        elif name == "cuStreamGetFlags":
            args[1][0] = self.flags
        elif name == "cuStreamGetId":
            args[1][0] = self.stream
        elif name == "cuThreadExchangeStreamCaptureMode":
            self.mode, args[0][0] = args[0][0], self.mode
        return self.results.get(name, result)


def end(rigs: Iterable[Rig]) -> None:
    """Close the rigs, and have the core call the process's own driver again."""
    for rig in rigs:
        rig.close()
    core.drop(core.of(None))
    core.bind_driver()
