"""Skips this folder's tests, with the reason, wherever there is no real GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ipcsync._drivers import load
from ipcsync.errors import NoDriver
from tests.kit import driver_kit as kit


@pytest.fixture(scope="session")
def real_gpu() -> str:
    """The name of device 0, which is a GPU behind NVIDIA's driver; skips without one."""
    if os.environ.get("IPCSYNC_DRIVER", "auto") == "host":
        pytest.skip("IPCSYNC_DRIVER=host chooses the software driver: set it to cuda on a machine with a GPU")
    try:
        load()
    except NoDriver as error:
        pytest.skip(str(error))
    if kit.driver_kind() != "gpu":
        pytest.skip(f"no real GPU here: the device is {kit.device_name()!r}")
    return kit.device_name()


@pytest.fixture
def context(real_gpu: str) -> Iterator[None]:
    """Device 0's primary context is current; afterwards every latch is open."""
    kit.use_device(0)
    yield
    kit.open_all_latches()
