"""The CUDA events behind the slots, and tests of the engines: all driver calls of coordinator and keeper."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import msgspec

from ipcsync import _drivers
from ipcsync._board import Board
from ipcsync._drivers.constants import (
    ERROR_NOT_READY,
    EVENT_BLOCKING_SYNC,
    EVENT_DISABLE_TIMING,
    EVENT_INTERPROCESS,
    STREAM_NON_BLOCKING,
    STREAM_WAIT_VALUE_GEQ,
    STREAM_WRITE_VALUE_DEFAULT,
)
from ipcsync._native import context, pinned
from ipcsync.errors import DriverError, InvalidDevice

_PROBE_S = 4.0  # what is found stays, so a busy machine must not be the reason; a request lasts longer
_PAUSE_S = 0.0005
_AT_A_TIME = 256  # of those that are set aside


class SharedCudaEvent(msgspec.Struct, frozen=True, array_like=True):
    """One interprocess CUDA event on a device (UUID). `serial` is never reused, but handle bytes can be."""

    serial: int
    device: str
    handle: bytes


class EventStore:
    """Makes, numbers, exports and destroys the interprocess events of all devices, given as UUID → ordinal.

    A device's context is created with its first event: an idle one costs hundreds of megabytes on a real GPU.
    """

    def __init__(self, devices: dict[str, int], board: Board) -> None:
        self._devices = devices
        self._board = board
        self._serial = 0
        self._made: dict[int, tuple[SharedCudaEvent, Any]] = {}
        self._probes: dict[str, SharedCudaEvent] = {}
        self._why_not_timeline: dict[str, str | None] = {}
        self._aside: dict[int, None] = {}  # to be destroyed, in the order in which they are asked for again

    def make(self, device: str, count: int) -> list[SharedCudaEvent]:
        """`count` new events on a device that is served here; DriverError, and none, if one cannot be made."""
        self._enter(device)
        made: list[SharedCudaEvent] = []
        try:
            for _ in range(count):
                made.append(self._make_one(device))  # noqa: PERF401 - those made before an error are destroyed
        except DriverError:
            self.destroy([shared.serial for shared in made])
            raise
        return made

    def _make_one(self, device: str) -> SharedCudaEvent:
        driver = _drivers.load()
        # Blocking: a host wait for it, or for an import of it if the driver passes that on, sleeps.
        flags = EVENT_INTERPROCESS | EVENT_DISABLE_TIMING | EVENT_BLOCKING_SYNC
        event = _drivers.unwrap(driver.cuEventCreate(flags), "cuEventCreate")
        # Exported at once: the export needs the current context, and always gives the same bytes.
        exported = driver.cuIpcGetEventHandle(event)
        if exported[0] is not _drivers.SUCCESS:
            driver.cuEventDestroy(event)
        handle = _drivers.unwrap(exported, "cuIpcGetEventHandle")
        self._serial += 1
        shared = SharedCudaEvent(self._serial, device, _drivers.handle_bytes(handle))
        self._made[shared.serial] = shared, event
        return shared

    def destroy(self, serials: list[int]) -> int:
        """Destroy these events, or with none of them some of those that are set aside; returns how many then are.

        Set aside is what has a pending record, which a dead process may leave for ever. A driver makes the next event
        in the place of a destroyed one, where the record could still signal it, or block its records. Unknown ones are
        gone already.
        """
        driver = _drivers.load()
        for serial in serials or list(islice(self._aside, _AT_A_TIME)):
            if serial not in self._made:
                continue
            self._aside.pop(serial, None)
            shared, event = self._made[serial]
            self._enter(shared.device)
            if int(driver.cuEventQuery(event)[0]) == ERROR_NOT_READY:
                self._aside[serial] = None  # behind the others
                continue
            del self._made[serial]
            _drivers.unwrap(driver.cuEventDestroy(event), "cuEventDestroy")
        return len(self._aside)

    def probe(self, device: str) -> bytes:
        """The handle of an event that is kept for clients that test whether handles open."""
        if device not in self._probes:
            (self._probes[device],) = self.make(device, 1)
        return self._probes[device].handle

    def held(self) -> list[SharedCudaEvent]:
        """All events but those of `probe`, and those that are set aside."""
        others = self._aside.keys() | {shared.serial for shared in self._probes.values()}
        return [shared for shared, _ in self._made.values() if shared.serial not in others]

    def why_not_timeline(self, device: str) -> str | None:
        """Why timeline words do not work on this device, None if they do; tested once, with real calls."""
        if device not in self._why_not_timeline:
            self._enter(device)
            try:
                self._why_not_timeline[device] = self._try_timeline()
            except DriverError as error:
                self._why_not_timeline[device] = str(error)
        return self._why_not_timeline[device]

    def _try_timeline(self) -> str | None:
        driver, board = _drivers.load(), self._board
        pointer = pinned.page(board.address) + board.probe_offset
        stream: Any = _drivers.unwrap(driver.cuStreamCreate(STREAM_NON_BLOCKING), "cuStreamCreate")
        try:
            value = (board.probe + 1) & 0xFFFFFFFF
            _drivers.unwrap(
                driver.cuStreamWriteValue64(stream, pointer, value, STREAM_WRITE_VALUE_DEFAULT), "cuStreamWriteValue64"
            )
            _drivers.unwrap(
                driver.cuStreamWaitValue64(stream, pointer, value, STREAM_WAIT_VALUE_GEQ), "cuStreamWaitValue64"
            )
            deadline = time.monotonic() + _PROBE_S
            # Until the wait is over too: it reads the board, which may be gone after this call.
            while board.probe != value or int(driver.cuStreamQuery(stream)[0]) == ERROR_NOT_READY:
                if time.monotonic() > deadline:
                    return f"a stream's write to the board, and its wait for that, were not over within {_PROBE_S:g} s"
                time.sleep(_PAUSE_S)  # the driver may need the core for it
        finally:
            _drivers.unwrap(driver.cuStreamDestroy(stream), "cuStreamDestroy")
        return None

    def _enter(self, device: str) -> None:
        context.ensure_context(self._devices[device])


def served_devices(wanted: list[int] | None) -> dict[str, int]:
    """UUID → ordinal of the devices to serve: `wanted`, by default all. InvalidDevice for an unknown ordinal.

    RuntimeError if the driver shows no device.
    """
    count = context.count()
    for ordinal in wanted or ():
        if not 0 <= ordinal < count:
            raise InvalidDevice(f"there is no device {ordinal}: {count} are visible")
    if not count:
        raise RuntimeError("the driver shows no device")
    return {context.uuid_of(ordinal): ordinal for ordinal in (range(count) if wanted is None else wanted)}
