"""Whether GPU work may outlive the process that submitted it."""

from __future__ import annotations

import os

from cuda.bindings.driver import CUdevice_attribute

from ipcsync import _drivers
from ipcsync._drivers import SUCCESS

_DEVICE_FILES = "/dev/nvidia"


def mps_directory() -> str:
    """Where an MPS control daemon's pipe is, if there is one."""
    return os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # noqa: S108 - CUDA's default


def may_be_served() -> bool:
    """Whether a CUDA MPS server may do this process's GPU work: its contexts are the server's, which lives on.

    The driver has an attribute of each device (CU_DEVICE_ATTRIBUTE_MPS_ENABLED, CUDA 12.3); with an older one, the
    control daemon's pipe says so, which a process uses if it finds it. A wrong True is harmless: the end of the
    process's work is then unknown.
    """
    if _drivers.name() == "cuda" and os.path.exists(os.path.join(mps_directory(), "control")):
        return True
    attribute = CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
    driver = _drivers.load()
    code, count = driver.cuDeviceGetCount()
    if code is not SUCCESS:
        return False
    answers = [driver.cuDeviceGetAttribute(attribute, driver.cuDeviceGet(ordinal)[1]) for ordinal in range(count)]
    return any(code is SUCCESS and value for code, value in answers)


def files_survive_exec() -> bool:
    """Whether any file of the driver stays open across exec."""
    return any(_is_kept(name) for name in os.listdir("/proc/self/fd"))


def _is_kept(descriptor: str) -> bool:
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        return path.startswith(_DEVICE_FILES) and os.get_inheritable(int(descriptor))
    except OSError:  # it was closed meanwhile
        return False
