"""What the processes of these tests do: one sends layers, one replays a graph over them."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import ipcsync
from ipcsync.testing import Memory, StreamGate
from tests.graphs.layers import Layers
from tests.kit import driver_functions
from tests.kit.driver_functions import Call
from tests.kit.until import DEADLINE_S

_kept: dict[str, Any] = {}


def connect(endpoint: str, name: str) -> None:
    """Connect this process's client."""
    _kept["client"] = ipcsync.connect(endpoint, name=name)


def open_sources(handles: list[bytes], name: str) -> None:
    """Be the sender of these cells of another process, with an event of that name, held back."""
    _kept["stream"] = ipcsync.Stream()
    _kept["sources"] = [Memory(8, handle=handle) for handle in handles]
    _kept["event"] = _kept["client"].event(name, recorder=True, engine="timeline")


def hold() -> None:
    """Hold what is sent from now on."""
    _kept["gate"] = StreamGate(_kept["stream"]).__enter__()


def let_go() -> None:
    """Let it be sent."""
    _kept["gate"].open()


def send(value: int, *layers: int) -> list[bytes]:
    """Fill these cells, or all; the points, in bytes."""
    points = []
    for memory in [_kept["sources"][layer] for layer in layers] or _kept["sources"]:
        memory.fill(value, _kept["stream"])
        points.append(bytes(_kept["event"].record(_kept["stream"])))
    return points


def build_layers(count: int) -> None:
    """Have the cells, and no event."""
    _kept["layers"] = Layers(count)


def build(count: int, name: str, engine: ipcsync.typing.EngineName) -> list[bytes]:
    """Be the one that replays, and records on that event; the handles of the cells."""
    layers = _kept["layers"] = Layers(count)
    _kept["done"] = _kept["client"].event(name, recorder=True, engine=engine)
    return [memory.handle() for memory in layers.source]


def replay_without_points() -> list[int]:
    """Replay with neither waits nor records; what the cells have."""
    layers: Layers = _kept["layers"]
    graph = layers.capture(*range(len(layers.source)), waits=False, records=False)
    with _kept["client"].replay({}, stream=layers.stream):
        layers.launch(graph)
    layers.stream.synchronize(DEADLINE_S)
    return layers.found()


def replay(points: list[bytes], dies_at: int = -1) -> list[bytes]:
    """Replay over these; it is killed behind that call of the driver."""
    layers: Layers = _kept["layers"]
    client: ipcsync.Client = _kept["client"]
    made = iter(range(1000))

    def deadly(real: Call, *arguments: Any) -> int:
        result = real(*arguments)
        if next(made) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    waits = {wait: client.point(data) for wait, data in zip(layers.waits, points, strict=True)}
    records = dict.fromkeys(layers.records, _kept["done"])
    with (
        driver_functions.replaced({"cuStreamBatchMemOp": deadly}),
        client.replay(waits, records, stream=layers.stream, timeout=20) as made_records,
    ):
        layers.launch()
    return [bytes(made_records[record]) for record in layers.records]


def found() -> list[int]:
    """What the layers have copied, once the launch stream has nothing left to do."""
    _kept["layers"].stream.synchronize(DEADLINE_S)
    found: list[int] = _kept["layers"].found()
    return found


def outcome(data: bytes) -> tuple[str, str | None, int]:
    """What becomes of a point: complete, or the error's name, cause and pid."""
    try:
        _kept["client"].point(data).synchronize(DEADLINE_S / 2)
    except ipcsync.RecorderLost as error:
        return type(error).__name__, error.cause, error.pid
    return "complete", None, 0


def settle() -> int:
    """Resolve what the records depend on, as each beat does; the first generation that is not settled, 0 for none."""
    engine = _kept["done"]._engine
    engine.publish_completed()
    return int(engine.first_unsettled())


def open_seen(name: str) -> None:
    """Open an event without its role."""
    _kept["seen"] = _kept["client"].event(name)


def outcome_of(generation: int) -> tuple[str, str | None, int]:
    """What becomes of a generation of that event."""
    return outcome(bytes(_kept["seen"].at(generation)))


def resume() -> None:
    """Forget what the launch stream waited for and lost."""
    _kept["client"].resume(_kept["layers"].stream, timeout=DEADLINE_S / 2)


def record_behind(name: str) -> str:
    """An ordinary record on the launch stream: the cause of its error, or its event's name."""
    try:
        with _kept["client"].event(name, recorder=True, engine="timeline") as event:
            event.record(_kept["layers"].stream)
    except ipcsync.RecorderLost as error:
        return str(error.cause)
    return name


def open_anew(name: str, engine: ipcsync.typing.EngineName) -> None:
    """Record on another event from now on."""
    _kept["done"] = _kept["client"].event(name, recorder=True, engine=engine)


def replay_and_close(points: list[bytes]) -> str:
    """Close the client within the block; the error of the block's end. The launch is over then."""
    try:
        client: ipcsync.Client = _kept["client"]
        layers: Layers = _kept["layers"]
        waits = {wait: client.point(data) for wait, data in zip(layers.waits, points, strict=True)}
        records = dict.fromkeys(layers.records, _kept["done"])
        with client.replay(waits, records, stream=layers.stream, timeout=20):
            layers.launch()
            client.close()
    except ipcsync.IpcSyncError as error:
        return type(error).__name__
    return ""


def replay_and_fork(points: list[bytes]) -> str:
    """Fork within the block; the error of the block's end in the child. The parent's block ends in order."""
    client: ipcsync.Client = _kept["client"]
    layers: Layers = _kept["layers"]
    waits = {wait: client.point(data) for wait, data in zip(layers.waits, points, strict=True)}
    records = dict.fromkeys(layers.records, _kept["done"])
    reader, writer = os.pipe()
    child = -1
    try:
        with client.replay(waits, records, stream=layers.stream, timeout=20):
            child = os.fork()
            if child:
                layers.launch()
    except ipcsync.IpcSyncError as error:
        os.write(writer, type(error).__name__.encode())
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(reader, 100).decode()


def replay_and_exit(points: list[bytes]) -> int:
    """The exit status of a child that is forked within the block, and ends there."""
    client: ipcsync.Client = _kept["client"]
    layers: Layers = _kept["layers"]
    waits = {wait: client.point(data) for wait, data in zip(layers.waits, points, strict=True)}
    child, status = -1, 0
    try:
        with client.replay(waits, stream=layers.stream, timeout=20):
            child = os.fork()
            if not child:
                sys.exit(7)
            layers.launch()
    except BaseException as end:
        if child:
            raise
        status = 7 if isinstance(end, SystemExit) else 1
    if not child:
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def send_held(value: int, replays: int) -> list[list[bytes]]:
    """Fill all cells once the stream is let go; the points of each layer, for so many replays."""
    hold()
    for memory in _kept["sources"]:
        memory.fill(value, _kept["stream"])
    return [[bytes(_kept["event"].record(_kept["stream"])) for _ in _kept["sources"]] for _ in range(replays)]


def replay_burst(points: list[list[bytes]]) -> tuple[list[bytes], list[int], str]:
    """A replay for each; the last points of their records, what each has copied, and the error that ended it."""
    layers: Layers = _kept["layers"]
    client: ipcsync.Client = _kept["client"]
    seen: list[Memory] = _kept.setdefault("seen", [])
    seen += [Memory(8, pinned=True) for _ in range(len(points) * len(layers.target) - len(seen))]
    free, made, error = iter(seen), [], ""
    try:
        for each in points:
            waits = {wait: client.point(data) for wait, data in zip(layers.waits, each, strict=True)}
            records = dict.fromkeys(layers.records, _kept["done"])
            with client.replay(waits, records, stream=layers.stream, timeout=20) as replay:
                layers.launch()
                for target in layers.target:
                    next(free).copy_from(target, layers.stream)
            made.append(bytes(replay[layers.records[-1]]))
    except ipcsync.IpcSyncError as raised:
        error = f"{type(raised).__name__} {getattr(raised, 'cause', '')}"
    layers.stream.synchronize(DEADLINE_S)
    return made, [memory.read()[0] for memory in seen[: len(made) * len(layers.target)]], error


def outcomes(points: list[bytes]) -> list[tuple[str, str | None, int]]:
    """What becomes of each; the last one is waited for first."""
    return [outcome(data) for data in reversed(points)][::-1]
