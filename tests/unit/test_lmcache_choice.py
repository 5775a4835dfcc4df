"""Which of LMCache's devices the plugin is, by LMCache's two variables and by whether there is a GPU.

Neither LMCache nor torch is here: what the plugin takes from them are stand-ins.
"""

from __future__ import annotations

import pytest

from tests.kit import scripts

pytestmark = pytest.mark.process

_STAND_INS = """
import sys
from types import ModuleType


def module(name, **names):
    made = sys.modules[name] = ModuleType(name)
    made.__path__ = []
    vars(made).update(names)


class Spec:
    def is_available(self):
        return has_gpu


class Cuda(Spec): ...
class Cpu(Spec): ...
class Cudas:
    is_available = staticmethod(lambda: has_gpu)


module("torch", cuda=Cudas)
for name in ("lmcache", "lmcache.v1", "lmcache.v1.platform", "lmcache.v1.platform.devices"):
    module(name)
module("lmcache.v1.platform.devices.cpu", CpuDeviceSpec=Cpu)
module("lmcache.v1.platform.devices.cpu.stub_cpu_device", StubCPUDevice=lambda kind: kind)
module("lmcache.v1.platform.devices.cuda", CudaDeviceSpec=Cuda)

from ipcsync.integrations.lmcache import device
chosen = device.IpcSyncDeviceSpec()
assert (chosen.backend_name, isinstance(chosen, Cpu), chosen.is_available()) == ("ipcsync", *expected), chosen
"""


@pytest.mark.parametrize(
    ("backend", "kind", "has_gpu", "is_cpu", "is_available"),
    [
        ("ipcsync", "", True, False, True),
        ("ipcsync", "cpu", True, True, True),
        (" IPCSYNC ", " CPU ", True, True, True),
        ("ipcsync", "cuda", True, False, True),
        ("ipcsync", "", False, True, True),
        ("ipcsync", "cpu", False, True, True),
        ("", "", True, False, False),
        ("", "cpu", True, False, False),
        ("other", "cpu", False, False, False),
    ],
)
def test_both_variables_say_which_device_it_is(
    backend: str, kind: str, *, has_gpu: bool, is_cpu: bool, is_available: bool
) -> None:
    settings = {"LMCACHE_DEVICE_BACKEND": backend, "DEVICE_TYPE": kind}
    scripts.run(f"has_gpu, expected = {has_gpu}, ({is_cpu}, {is_available})\n{_STAND_INS}", **settings)
