"""Devices as in torch.cuda: the list, the current one, and their properties."""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ipcsync import _drivers
from ipcsync._drivers import ERROR_NO_DEVICE, DriverObject
from ipcsync._native import context, fork
from ipcsync._native.context import call, current_ordinal, ordinal_of, uuid_of
from ipcsync._native.fork import is_in_bad_fork
from ipcsync.errors import DriverError, ForkedProcessError, InvalidDevice, NoDriver
from ipcsync.typing import DeviceLike

__all__ = [
    "Device",
    "DeviceProperties",
    "can_device_access_peer",
    "current_device",
    "device",
    "device_count",
    "driver_name",
    "driver_version",
    "exchange_device",
    "get_device_properties",
    "has_primary_context",
    "ipc_collect",
    "is_available",
    "is_in_bad_fork",
    "maybe_exchange_device",
    "set_device",
]

_CUDA = re.compile(r"cuda(?::(0|[1-9][0-9]{0,8}))?")
_KIND = re.compile(r"([a-z]+)(:[0-9]+)?")
_UUID = re.compile(r"(GPU-)?[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}", re.IGNORECASE)

collectors: list[Callable[[], int]] = []
"""Functions that `ipc_collect` calls: each closes the imported handles that nothing uses, and returns how many."""


@dataclass(frozen=True)
class Device:
    """A CUDA device of this process, by its ordinal `index`."""

    index: int

    @property
    def type(self) -> str:
        """Always "cuda", on the software driver too."""
        return "cuda"

    def __str__(self) -> str:
        return f"cuda:{self.index}"

    def __repr__(self) -> str:
        return f"Device(type='cuda', index={self.index})"


@dataclass(frozen=True)
class DeviceProperties:
    """A device's properties. `uuid` is 8-4-4-4-12 hexadecimal digits, `total_memory` is in bytes."""

    name: str
    major: int
    minor: int
    uuid: str
    total_memory: int
    multi_processor_count: int
    max_threads_per_multi_processor: int
    regs_per_multiprocessor: int
    is_integrated: bool
    is_multi_gpu_board: bool
    ordinal: int


def kind_of(device: DeviceLike | None) -> str:
    """The device type of an argument: "cuda" unless it names another ("cpu", torch.device("cpu"))."""
    if isinstance(device, str):
        match = _KIND.fullmatch(device)
        return match[1] if match and not _UUID.fullmatch(device) else "cuda"
    kind = getattr(device, "type", "cuda")
    return kind if isinstance(kind, str) else "cuda"


def parse(device: DeviceLike | None) -> int:
    """The ordinal of a device as users give it; of the current one for None and "cuda". Raises as `set_device`."""
    if isinstance(device, str):
        if _UUID.fullmatch(device):
            return ordinal_of(device)
        match = _CUDA.fullmatch(device)
        if match is None:
            raise InvalidDevice(f"{device!r} is not a CUDA device: expected 'cuda', 'cuda:<n>' or a UUID ('GPU-…')")
        index = None if match[1] is None else int(match[1])
    elif kind_of(device) != "cuda":
        raise InvalidDevice(f"{device!r} is not a CUDA device")
    else:
        index = _index(device)
    if index is None:
        index = current_ordinal()
    here = context.count()
    if 0 <= index < here:
        return index
    named = "the current device" if device is None else repr(device)
    raise InvalidDevice(f"{named} is not a device of this process, which sees {here}, from 0 on")


def _index(device: DeviceLike | None) -> int | None:
    """The number in an int or in a device object; None for the current one: None itself, or an object that names it."""
    names = ("index", "device_id", "id")  # torch's, cuda.core's, cupy's
    for candidate in (device, *(getattr(device, name) for name in names if hasattr(device, name))):
        if candidate is None:
            return None
        if not isinstance(candidate, bool):
            with contextlib.suppress(TypeError):
                return operator.index(candidate)
    raise TypeError(f"a device is an int, a string or a device object, but got {type(device).__name__}")


def driver_name() -> str:
    """The driver in use, "cuda" or "host": IPCSYNC_DRIVER (auto, cuda or host) and this machine decide.

    In a forked child it is the parent's, and no driver is touched: ForkedProcessError if the parent had loaded none.
    Raises NoDriver if neither works, ValueError for another value of IPCSYNC_DRIVER.
    """
    if not (is_forked := is_in_bad_fork()):
        fork.arm()
    return _drivers.name(is_forked=is_forked)


def driver_version() -> int:
    """The CUDA version that the driver supports: 13000 for 13.0. Raises NoDriver if there is no usable driver."""
    return int(call("cuDriverGetVersion"))


def is_available() -> bool:
    """Whether there is a driver that works and at least one device. False in a child forked after first use."""
    try:
        return device_count() > 0
    except (ForkedProcessError, DriverError):
        return False


def device_count() -> int:
    """How many devices this process sees; 0 without a working driver. Arms the fork guard, as torch does."""
    try:
        return context.count()
    except NoDriver:
        return 0
    except DriverError as error:
        if error.code == ERROR_NO_DEVICE:
            return 0
        raise


def current_device() -> int:
    """The device of the context that is current on this thread; 0 if there is none."""
    return parse(None)


def set_device(device: DeviceLike | None) -> None:
    """Make a device current on this thread, with its primary context; a negative number does nothing.

    Raises InvalidDevice if this process has no such device, TypeError for an argument of another type.
    """
    exchange_device(device)


def exchange_device(device: DeviceLike | None) -> int:
    """As `set_device`, errors included; returns the ordinal that was current before, -1 for a negative number."""
    if isinstance(device, int) and device < 0:
        fork.arm()
        return -1
    wanted, before = parse(device), current_ordinal()
    context.ensure_context(wanted)
    return before


def maybe_exchange_device(device: DeviceLike | None) -> int:
    """As `exchange_device`, but a device without a primary context is left alone, so that none is made for it."""
    is_negative = isinstance(device, int) and device < 0
    return exchange_device(device) if is_negative or has_primary_context(device) else current_ordinal()


class Entered(threading.local):
    """What the `with` blocks of one object have to restore: a stack for each thread, so that they may be nested."""

    def __init__(self) -> None:
        self.blocks: list[Any] = []

    def __reduce__(self) -> tuple[type[Entered], tuple[()]]:
        """A copy of the object, in whatever process, is entered nowhere."""
        return type(self), ()


class device:  # noqa: N801 - torch.cuda's name for it
    """A `with` block in which a device is current on this thread; afterwards the earlier context is current again.

    A negative number changes nothing. One object can be used by several threads, and nested. Its making raises
    InvalidDevice and TypeError as `set_device`.
    """

    def __init__(self, device: DeviceLike | None = None) -> None:
        self.idx: int = -1 if isinstance(device, int) and device < 0 else parse(device)
        self._entered = Entered()

    def __enter__(self) -> device:
        before = call("cuCtxGetCurrent")
        if self.idx >= 0:
            context.ensure_context(self.idx)
        self._entered.blocks.append(before)
        return self

    def __exit__(self, *error: object) -> None:
        before = self._entered.blocks.pop()
        if self.idx >= 0 and not is_in_bad_fork():
            call("cuCtxSetCurrent", before)


@functools.cache
def _properties(ordinal: int) -> DeviceProperties:
    from cuda.bindings.driver import CUdevice_attribute as Attribute

    handle = context.devices()[ordinal]

    def ask(attribute: DriverObject) -> int:
        return int(call("cuDeviceGetAttribute", attribute, handle))

    return DeviceProperties(
        name=bytes(call("cuDeviceGetName", 256, handle)).partition(b"\0")[0].decode(errors="replace"),
        major=ask(Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        minor=ask(Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        uuid=uuid_of(ordinal),
        total_memory=int(call("cuDeviceTotalMem", handle)),
        multi_processor_count=ask(Attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        max_threads_per_multi_processor=ask(Attribute.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR),
        regs_per_multiprocessor=ask(Attribute.CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR),
        is_integrated=bool(ask(Attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED)),
        is_multi_gpu_board=bool(ask(Attribute.CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD)),
        ordinal=ordinal,
    )


def get_device_properties(device: DeviceLike | None = None) -> DeviceProperties:
    """The device's properties; the driver is asked once. Raises InvalidDevice and TypeError as `set_device`."""
    return _properties(parse(device))


def can_device_access_peer(device: DeviceLike | None, peer: DeviceLike | None) -> bool:
    """Whether `device` reads memory of `peer`, another one. Raises InvalidDevice and TypeError as `set_device`."""
    ordinal, other = parse(device), parse(peer)
    handles = context.devices()
    return bool(call("cuDeviceCanAccessPeer", handles[ordinal], handles[other]))


def has_primary_context(device: DeviceLike | None) -> bool:
    """Whether the device's primary context is retained; makes none. Raises InvalidDevice, TypeError as `set_device`."""
    return context.has_primary(parse(device))


def ipc_collect() -> int:
    """Close the imported handles that nothing uses any more; returns how many."""
    fork.arm()
    return sum(collect() for collect in tuple(collectors))
