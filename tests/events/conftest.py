"""What several of these tests begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda.bindings.driver import CUstreamCaptureMode

from ipcsync import _drivers
from ipcsync.typing import EngineName
from tests.events.stage import NewClient, Stage
from tests.kit.driver_calls import DriverCalls

_GLOBAL = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


@pytest.fixture
def stage(new_client: NewClient, engine: EngineName) -> Iterator[Stage]:
    one = Stage(new_client, engine)
    yield one
    one.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[DriverCalls]:
    made = DriverCalls(monkeypatch)
    yield made
    made.end()
    _drivers.load().cuThreadExchangeStreamCaptureMode(_GLOBAL)  # which one that was refused did not restore
