"""Plugins of LMCache's entry-point group `lmcache.device_plugins`: LMCache's own devices, with ipcsync's events.

LMCache loads every installed plugin. These are available only if $LMCACHE_DEVICE_BACKEND names them, so an installed
ipcsync does not change LMCache's choice of a device.
"""

from __future__ import annotations

import os

import torch
from lmcache.v1.platform.devices.cpu import CpuDeviceSpec
from lmcache.v1.platform.devices.cpu.stub_cpu_device import StubCPUDevice
from lmcache.v1.platform.devices.cuda import CudaDeviceSpec

from ipcsync.integrations.lmcache import CpuEventBackend, IpcSyncEventBackend

BACKEND = "ipcsync"
_CPU_MODULE = "_ipcsync_lmcache_cpu"


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip().lower()


def _is_chosen() -> bool:
    return _variable("LMCACHE_DEVICE_BACKEND") == BACKEND


def _is_for_cpu() -> bool:
    """Whether the device is the CPU: LMCache's other variable says so, or torch has no GPU."""
    return _variable("DEVICE_TYPE") == "cpu" or not torch.cuda.is_available()


class _WithPoints:
    """What both devices have of ours."""

    _events = IpcSyncEventBackend()

    @property
    def backend_name(self) -> str:
        """What $LMCACHE_DEVICE_BACKEND names."""
        return BACKEND

    @property
    def event_ipc_backend(self) -> IpcSyncEventBackend:
        """The events of this process's default client."""
        return self._events


class IpcSyncCudaSpec(_WithPoints, CudaDeviceSpec):
    """LMCache's CUDA device with other events."""

    def is_available(self) -> bool:
        """Whether it was chosen, there is a GPU, and $DEVICE_TYPE does not ask for the CPU."""
        return _is_chosen() and not _is_for_cpu() and super().is_available()


class IpcSyncCpuSpec(_WithPoints, CpuDeviceSpec):
    """LMCache's CPU device with other events."""

    _events = CpuEventBackend()

    @property
    def torch_module_name(self) -> str:
        """The attribute of torch that is the device's module.

        If no device is available, LMCache uses a stand-in of its own, since torch.cpu lacks most functions that it
        calls. For a device that is chosen by name it looks in torch, so the stand-in is put there.
        """
        if not hasattr(torch, _CPU_MODULE):
            setattr(torch, _CPU_MODULE, StubCPUDevice("cpu"))
        return _CPU_MODULE

    def is_available(self) -> bool:
        """Whether it was chosen, and $DEVICE_TYPE asks for the CPU or torch has no GPU."""
        return _is_chosen() and _is_for_cpu()


IpcSyncDeviceSpec: type[CudaDeviceSpec | CpuDeviceSpec] = (
    IpcSyncCpuSpec if _is_chosen() and _is_for_cpu() else IpcSyncCudaSpec
)
