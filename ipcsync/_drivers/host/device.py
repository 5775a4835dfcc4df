"""The devices of the host driver: their number, those that this process sees, and their attributes."""

from __future__ import annotations

import ctypes
import os
import uuid
from typing import Any

from cuda.bindings.driver import CUdevice, CUdevice_attribute, CUuuid

from ipcsync._drivers.host.layout import MAX_DEVICES
from ipcsync._drivers.host.results import INVALID_DEVICE, INVALID_VALUE, SUCCESS, CallFailed, Result, entry, number

# The same in every process of every machine.
_REST_OF_UUID = uuid.UUID("00000000-1f0e-4b3c-9a55-6970637379ff")

# By the names of CUdevice_attribute: of some the numbers, of some the names differ between versions of the binding.
_ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 1,
    "MAX_THREADS_PER_MULTIPROCESSOR": 1024,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "MAX_THREADS_PER_BLOCK": 1024,
    "WARP_SIZE": 32,
    "ASYNC_ENGINE_COUNT": 1,
    "CONCURRENT_KERNELS": 1,
    "UNIFIED_ADDRESSING": 1,
    "CAN_MAP_HOST_MEMORY": 1,
    "STREAM_PRIORITIES_SUPPORTED": 1,
    "IPC_EVENT_SUPPORTED": 1,
    "HOST_REGISTER_SUPPORTED": 1,
    "READ_ONLY_HOST_REGISTER_SUPPORTED": 1,
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 1,
    "CAN_USE_STREAM_MEM_OPS_V1": 1,
    "CAN_USE_64_BIT_STREAM_MEM_OPS": 1,
    "CAN_USE_64_BIT_STREAM_MEM_OPS_V1": 1,
    "CAN_USE_STREAM_WAIT_VALUE_NOR": 1,
    "CAN_USE_STREAM_WAIT_VALUE_NOR_V1": 1,
    "CAN_USE_STREAM_MEM_OPS": 1,
}


class Devices:
    """This process's devices: their physical numbers in the order of its ordinals, and the memory of each."""

    def __init__(self) -> None:
        self.visible: list[int] = []
        self.memory_limit = 0  # bytes

    def read_environment(self) -> None:
        """Take IPCSYNC_HOST_DEVICES, IPCSYNC_HOST_MEMORY_MB and CUDA_VISIBLE_DEVICES; ValueError for no numbers."""
        count = _setting("IPCSYNC_HOST_DEVICES", 1, MAX_DEVICES)
        self.memory_limit = _setting("IPCSYNC_HOST_MEMORY_MB", 16384, 1 << 40) << 20
        self.visible = visible_devices(count, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _setting(variable: str, default: int, most: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal() or int(text) > most:
        raise ValueError(f"{variable} must be a number from 0 to {most}, but is {text!r}")
    return int(text)


devices = Devices()


def device_uuid(physical: int) -> uuid.UUID:
    """The UUID of a physical device."""
    begin = (physical + 1) * 0x9E3779B1 & 0xFFFFFFFF  # another for each, so that few digits tell them apart
    return uuid.UUID(int=begin << 96 | _REST_OF_UUID.int)  # not uuid5, whose hash loads OpenSSL: 2 MB


def visible_devices(count: int, wanted: str | None) -> list[int]:
    """The physical devices, of `count`, that CUDA_VISIBLE_DEVICES=`wanted` (None: not set) shows, in its order.

    As in CUDA an entry is an index or a `GPU-` UUID of which a beginning will do, the first one that names nothing ends
    the list, and one named twice empties it.
    """
    if wanted is None:
        return list(range(count))
    found: list[int] = []
    names = [f"GPU-{device_uuid(physical)}" for physical in range(count)]
    for item in map(str.strip, wanted.split(",")):
        if item.isdecimal():
            matches = [int(item)] if int(item) < count else []
        else:
            begins = item.lower()
            matches = [i for i, name in enumerate(names) if len(item) > len("GPU-") and name.lower().startswith(begins)]
        if len(matches) != 1:
            break
        if matches[0] in found:
            return []
        found.append(matches[0])
    return found


def ordinal_of(dev: Any) -> int:
    """The ordinal that a CUdevice or an int stands for; refused for an unknown one."""
    ordinal = number(dev)
    if not 0 <= ordinal < len(devices.visible):
        raise CallFailed(INVALID_DEVICE)
    return ordinal


@entry(1)
def cuDeviceGetCount() -> Result:
    """How many devices this process sees."""
    return SUCCESS, len(devices.visible)


@entry(1)
def cuDeviceGet(ordinal: Any) -> Result:
    """The device of an ordinal."""
    return SUCCESS, CUdevice(ordinal_of(ordinal))


@entry(1)
def cuDeviceGetName(length: Any, dev: Any) -> Result:
    """The name of a device: bytes of exactly `length`, ended and filled up with zeros."""
    name = f"ipcsync host device {devices.visible[ordinal_of(dev)]}".encode()
    if number(length) < 1:
        raise CallFailed(INVALID_VALUE)
    return SUCCESS, name[: length - 1].ljust(length, b"\0")


@entry(1)
def cuDeviceGetUuid(dev: Any) -> Result:
    """The UUID of a device, the same in every process."""
    result = CUuuid()
    ctypes.memmove(result.getPtr(), device_uuid(devices.visible[ordinal_of(dev)]).bytes, 16)
    return SUCCESS, result


@entry(1)
def cuDeviceGetAttribute(attrib: Any, dev: Any) -> Result:
    """A number that describes a device; 0 for what this driver does not have."""
    physical = devices.visible[ordinal_of(dev)]
    try:
        name = CUdevice_attribute(attrib).name.removeprefix("CU_DEVICE_ATTRIBUTE_")
    except ValueError:
        raise CallFailed(INVALID_VALUE) from None
    return SUCCESS, physical + 1 if name == "PCI_BUS_ID" else _ATTRIBUTES.get(name, 0)


@entry(1)
def cuDeviceTotalMem(dev: Any) -> Result:
    """How many bytes of memory a device has: IPCSYNC_HOST_MEMORY_MB."""
    ordinal_of(dev)
    return SUCCESS, devices.memory_limit


@entry(1)
def cuDeviceCanAccessPeer(dev: Any, peerDev: Any) -> Result:
    """1 for two different devices: all memory is the host's."""
    return SUCCESS, int(ordinal_of(dev) != ordinal_of(peerDev))
