from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from ipcsync._board import Board, SessionLine, SlotLine
from ipcsync._drivers import DriverObject
from ipcsync._engines.engine import Guard
from ipcsync._engines.loss import Loss
from ipcsync._linux.process import ForkMark
from ipcsync._native.stream import Stream
from ipcsync._session.session import Session
from ipcsync._wire.messages import Attachment
from ipcsync.errors import CaptureError
from ipcsync.typing import EngineName, StreamLike

_T = TypeVar("_T", bound=type)

INTERFACE: int
FUNCTIONS: dict[str, bytes]

class SessionCheck:
    good_until: int
    shortcuts: int
    slow_calls: int
    def __init__(
        self, fork_mark: ForkMark, board: Board, line: SessionLine, serial: int, live: int, slowly: Callable[[], None]
    ) -> None: ...
    def check(self) -> None: ...

class Line:
    base: int
    def __init__(self, board: Board, line: SlotLine, base: int) -> None: ...
    def first_unsettled(self) -> int: ...
    def is_lost(self, generation: int) -> bool: ...
    def is_clear(self, generation: int) -> bool: ...

class Wait:
    view: Any
    outcome: Loss | bool | None
    generation: int
    stream: int
    key: int
    is_queued: bool
    def __init__(self, view: Core, generation: int, key: int, stream: int) -> None: ...
    label: str
    def is_on(self, ordinal: int) -> bool: ...
    def known_outcome(self) -> Loss | bool | None: ...
    def resolved(self) -> Loss | bool | None: ...
    def is_passed(self) -> bool: ...

class Core(Line):
    name: str
    node: str
    kind: EngineName
    origin: tuple[bytes, int, int]
    board: Board
    line: SlotLine
    guard: Guard
    slot: int
    ordinal: int
    depth: int
    incarnation: int
    is_recorder: bool
    is_closed: bool
    is_traced: bool
    chain: Any
    earlier: Core | None
    marker_count: int
    last_stream: int
    _lost_from: int
    _recorded: int
    def __init__(
        self, board: Board, guard: Guard, attachment: Attachment, ordinal: int, fork_mark: ForkMark
    ) -> None: ...
    recorder: int
    generation: int
    known_complete: int
    is_released: bool
    _flags: int
    _address: int
    completed: int
    may_be_recorded: bool
    oldest_in_the_way: int
    def open_first(self, generation: int = ...) -> None: ...
    def check(self) -> None: ...
    def check_liveness(self, generation: int) -> None: ...
    def raise_if_over(self, generation: int) -> None: ...
    def outcome_of(self, generation: int) -> Loss | bool | None: ...
    def query(self, generation: int, patience_s: float = ...) -> bool: ...
    def await_recorded(self, generation: int, deadline_ns: int, timeout: float | None) -> None: ...
    def await_complete(self, generation: int, timeout: float | None, began: int = ..., since: int = ...) -> None: ...
    def synchronize(self, generation: int, timeout: float | None = ..., began: int = ...) -> None: ...
    def publish_completed(self) -> None: ...
    def queue(
        self,
        handle: DriverObject,
        ordinal: int,
        generation: int,
        timeout: float | None,
        ahead: bool,
        began: int,
        what: str = ...,
    ) -> int: ...
    def record_next(
        self, handle: DriverObject, deadline_ns: int, timeout: float | None, further: Sequence[Wait] | None
    ) -> int: ...
    def await_calls(self, seconds: float) -> bool: ...
    def close(self) -> None: ...
    def try_release(self) -> bool: ...
    def free_streams(self) -> None: ...
    def is_drained(self) -> bool: ...
    def has_passed(self, stream: int) -> bool: ...

class PointBase: ...
class EventBase: ...

class Place:
    _address: int
    _index: int
    def _note_capture(self) -> None: ...
    def __init__(self, index: int, address: int, *, is_gate: bool) -> None: ...

class Bracket:
    _is_used: bool
    _is_over: bool
    _is_ahead: bool
    def _record_of(self, record: Place) -> tuple[Any, int]: ...

class Lane:
    ordinal: int
    home: DriverObject
    feeder: Stream
    drainer: Stream
    stream_id: int
    feeder_id: int
    key: int
    is_free: bool
    words: dict[str, tuple[int, int]]
    def __init__(
        self,
        ordinal: int,
        home: object,
        own: tuple[Stream, Stream],
        ids: tuple[int, int],
        words: dict[str, tuple[int, int]],
    ) -> None: ...
    def serve(self, launch: DriverObject, stream_id: int, key: int) -> bool: ...
    def end_from_outside(self, of_whom: object) -> None: ...

class ReplayingBase:
    _session: Session
    _stream: StreamLike | None
    _timeout: float | None
    _replay: Any
    _address: int
    _ordinal: int
    def __init__(
        self,
        session: Session,
        waits: Mapping[Any, Any],
        records: Mapping[Any, Any],
        stream: StreamLike | None,
        timeout: float | None,
        ahead: bool,
    ) -> None: ...
    def __enter__(self) -> Any: ...  # noqa: ANN401 - its Replay
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    def _locate(self) -> None: ...
    def _enter(self) -> None: ...
    def _leave(self, error: BaseException | None, elsewhere: CaptureError | None = ...) -> None: ...
    def _end_from_outside(self) -> None: ...
    _drainer: Stream

lanes_of_process: dict[int, Lane]

def add(key: int, view: Core, generation: int, stream: int) -> Wait: ...
def drop(waits: Iterable[Wait]) -> None: ...
def release(view: Core) -> None: ...
def of(key: int | None) -> list[Wait]: ...
def latest(key: int | None) -> list[Wait]: ...
def shortened(names: str) -> Callable[[_T], _T]: ...
def know_streams(cls: type) -> None: ...
def bind_driver() -> str | None: ...
def bind_functions(addresses: dict[str, Any]) -> None: ...
def set_times(nobody_ns: int | None = ..., patience_ns: int | None = ...) -> None: ...
def has_turn() -> bool: ...
def set_hook(address: int | None) -> None: ...
