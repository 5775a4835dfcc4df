"""The resources: runtime directory, listening sockets, board, CUDA events, journal.

The CUDA events are those behind the slots of the engine `event`. All driver calls are made here.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import resource
import socket
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

import ipcsync
from ipcsync import _drivers
from ipcsync import _room as room
from ipcsync._board import Board
from ipcsync._board.runtime_dir import RuntimeDir, RuntimeDirError
from ipcsync._drivers import ERROR_NOT_READY, EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING, EVENT_INTERPROCESS
from ipcsync._linux.files import memory_file
from ipcsync._linux.service_manager import ServiceManager
from ipcsync._logs import fields
from ipcsync._native import context
from ipcsync.errors import DriverError, InvalidDevice, QuotaExceeded
from ipcsync_keeper.config import Settings

log = logging.getLogger("ipcsync.coordinator")


Reason = Literal["died", "hung", "reloaded"]
"""Why a coordinator followed another one: that one hung and was killed, new code took over, or any other end."""


class StartupConfig(msgspec.Struct, frozen=True):
    """What a coordinator is told at its start. Times are of CLOCK_MONOTONIC, in ns.

    `settings` are those of the first start: no later coordinator changes those of `config.FIXED`.
    `started_ns` is when the resources were made, `unserved_ns` since when no coordinator serves, 0 at the first start.
    `restarts` counts the ends of earlier coordinators, by reason.
    """

    settings: Settings
    board: str
    driver: str
    devices: list[str]
    keeper_pid: int
    started_ns: int
    starts: int
    restarts: dict[Reason, int]
    unserved_ns: int
    events: list[SharedCudaEvent]


class Resources:
    """All resources, of a process in `role`; a failure while they are made leaves nothing behind."""

    def __init__(self, settings: Settings, role: str = "") -> None:
        started_ns = time.monotonic_ns()
        self.starts = 0
        self.restarts: Counter[Reason] = Counter({"died": 0, "hung": 0, "reloaded": 0})
        with ExitStack() as undo:
            self.directory = RuntimeDir(settings.runtime_dir)
            undo.callback(self.directory.close)
            devices = served_devices(settings.device_list())
            epoch = os.urandom(16)
            path = self.directory.board_path(epoch)
            self.board = Board.create(path, epoch, settings.max_sessions, settings.most_slots)
            undo.callback(self.board.unlink)
            if not self.board.show_life():
                log.warning("no robust futex: clients check /proc or a file lock to see whether this process lives")
            self.events = EventStore(devices)
            self.journal = JournalFiles.create()
            self.sockets = [listen(path) for path in self.directory.sockets]
            self.directory.sign(role)
            undo.pop_all()
        names = list(devices)
        self._config = StartupConfig(settings, path, _drivers.name(), names, os.getpid(), started_ns, 0, {}, 0, [])

    @property
    def descriptors(self) -> list[int]:
        """The descriptors for a coordinator in a process of its own: journal, sockets, the directory's lock."""
        return [*self.journal.descriptors, *(listening.fileno() for listening in self.sockets), self.directory.lock]

    def next_config(self, unserved_ns: int) -> StartupConfig:
        self.starts += 1
        restarts, events = dict(self.restarts), self.events.held()
        return replace(self._config, starts=self.starts, restarts=restarts, unserved_ns=unserved_ns, events=events)

    def report_ready(self, manager: ServiceManager, ready_fd: int | None, **more: object) -> None:
        """Report to the log, to whoever started this process, and to the service manager that requests are served."""
        endpoint, driver, epoch = self.directory.endpoint, _drivers.name(), self.board.epoch.hex()[:8]
        version = ipcsync.__version__
        log.info("ready", extra=fields(endpoint=endpoint, version=version, driver=driver, epoch=epoch, **more))
        if ready_fd is not None:
            os.write(ready_fd, f"{endpoint}\n".encode())
            os.close(ready_fd)
        manager.ready(f"serves {endpoint}")

    def close(self) -> None:
        """Remove the files: the board and the sockets. `Board.stop` was called before."""
        self.board.unlink()
        self.directory.close()


def report_failure(caught: Exception, what: str) -> bool:
    """Log why `what` cannot start: the error, with where it was if that helps. Whether something is short."""
    error = room.shortage(caught, what) or caught
    why = error if isinstance(error, RuntimeDirError) else f"{type(error).__name__}: {error}"
    log.error("cannot start", extra=fields(why=why), exc_info=not isinstance(error, RuntimeError | RuntimeDirError))
    return isinstance(error, QuotaExceeded)


def listen(path: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    listening.bind(path)
    soft, _ = room.limits_of(resource.RLIMIT_NOFILE)
    # At a coordinator's start, as many as wait may be accepted before they are counted (`Gate`).
    listening.listen(max(1, min(128, soft // 16)) if soft != resource.RLIM_INFINITY else 128)
    return listening


# --- the CUDA events --------------------------------------------------------------------------------------------------


class SharedCudaEvent(msgspec.Struct, frozen=True, array_like=True):
    """One interprocess CUDA event on a device (UUID). `serial` is never reused, but handle bytes can be."""

    serial: int
    device: str
    handle: bytes


class EventStore:
    """Makes, numbers, exports and destroys the interprocess events of all devices, given as UUID → ordinal.

    A device's context is created with its first event, and nothing else needs one: on a crowded GPU that may take
    seconds, and an idle context costs hundreds of megabytes.
    """

    def __init__(self, devices: dict[str, int]) -> None:
        self._devices = devices
        self._serials = itertools.count(1)
        self._made: dict[int, tuple[SharedCudaEvent, Any]] = {}
        self._pending = 0  # that many were destroyed with a pending record

    def make(self, device: str, count: int) -> list[SharedCudaEvent]:
        """`count` new events on a device that is served here; DriverError, and none, if one cannot be made."""
        context.ensure_context(self._devices[device])
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
        shared = SharedCudaEvent(next(self._serials), device, _drivers.handle_bytes(handle))
        self._made[shared.serial] = shared, event
        return shared

    def destroy(self, serials: list[int]) -> int:
        """Destroy these events; unknown ones are gone already. How many were destroyed with a pending record, ever.

        The driver keeps the place of such a one until that is complete, so no other event gets it. A dead process's
        record stays pending for ever. The first error is raised once all were tried.
        """
        driver, errors, made = _drivers.load(), list[DriverError](), self._made.copy()
        for serial in made.keys() & serials:
            shared, event = made[serial]
            try:
                context.ensure_context(self._devices[shared.device])
                if self._made.pop(serial, None):  # else a thread destroys it that an earlier coordinator asked
                    self._pending = (int(driver.cuEventQuery(event)[0]) == ERROR_NOT_READY) + self._pending
                    _drivers.unwrap(driver.cuEventDestroy(event), "cuEventDestroy")
            except DriverError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return self._pending

    def held(self) -> list[SharedCudaEvent]:
        """All events, in the order in which they were made."""
        return [shared for shared, _ in self._made.copy().values()]


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


JOURNAL_VERSION = 7
UNREADABLE = 3
"""The exit status of a coordinator that cannot read the journal."""

# Words of 8 bytes: which log is the current one (0 or 1); for each log, how many bytes are valid, and up to which byte
# the effects of its records have been carried out.
CURRENT, VALID, CARRIED_OUT = 0, 1, 3
# The fingerprint of the current request, 0: none; how many replies this start has sent; whether it is about to end.
CURRENT_REQUEST, REPLIES, IS_ENDING = 5, 6, 7
# Requests during which coordinators died: pairs of fingerprint and suspicion.
CRASHES, CRASH_COUNTERS = 8, 8
# Whether the last coordinator was killed by another process than the keeper.
KILLED_FROM_OUTSIDE = CRASHES + 2 * CRASH_COUNTERS
# How many replies of a session are kept: the most that any coordinator was set to.
MOST_REPLIES = KILLED_FROM_OUTSIDE + 1


# --- the journal's memory ---------------------------------------------------------------------------------------------


class JournalFiles:
    """The memory of a coordinator's journal: the descriptors of the page of words and of both logs.

    Stores of a killed process survive, in order: one store of a word makes a record valid, or a new log current.
    """

    def __init__(self, words: int, logs: tuple[int, int]) -> None:
        self.descriptors = (words, *logs)
        self.logs = logs
        self.words = memoryview(mmap.mmap(words, mmap.PAGESIZE)).cast("Q")

    @classmethod
    def create(cls) -> JournalFiles:
        words, *logs = (memory_file(f"ipcsync-journal-{part}") for part in ("words", "0", "1"))
        os.posix_fallocate(words, 0, mmap.PAGESIZE)
        return cls(words, (logs[0], logs[1]))

    def save(self, directory: str) -> str:
        """Write the valid records to a file for inspection, over an earlier one; its path, or why there is none."""
        which = self.words[CURRENT] & 1
        path = os.path.join(directory, "journal")
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(os.pread(self.logs[which], self.words[VALID + which], 0))
        except OSError as error:
            return f"not kept: {error}"
        return path
