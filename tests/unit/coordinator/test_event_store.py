"""Whether timeline words work is found out once, so what is found must not depend on how busy the machine is."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from ipcsync import _drivers
from tests.unit.coordinator.coordinator_world import World

_LATE_S = 1.5
"""No driver takes so long, but the kernel may keep its thread from a core for so long."""


def test_a_late_first_write_makes_no_device_unusable(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[threading.Timer] = []

    def write_late(_stream: Any, pointer: Any, value: int, _flags: int) -> tuple[Any]:
        word = ctypes.c_uint32.from_address(int(pointer))
        late.append(threading.Timer(_LATE_S, lambda: setattr(word, "value", value)))
        late[-1].start()
        return (_drivers.SUCCESS,)

    monkeypatch.setattr(_drivers.load(), "cuStreamWriteValue64", write_late)
    (device,) = world.pool.devices
    assert world.events.why_not_timeline(device) is None
    for timer in late:
        timer.join()
