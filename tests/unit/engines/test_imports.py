"""The table of imports, within whose calls a handler may make others of its thread."""

from __future__ import annotations

import sys
from itertools import count
from types import FrameType

import pytest

import ipcsync
from ipcsync import _drivers
from ipcsync._drivers import DriverObject
from ipcsync._engines import imports

pytestmark = pytest.mark.driver


def test_an_import_that_a_handler_acquires_within_the_last_release_is_not_destroyed(client: ipcsync.Client) -> None:
    """A handler runs behind a call that returned, so one is made behind each of the release in turn."""
    event = client.event("imported", recorder=True, engine="event", depth=1)
    event.record().synchronize(5)
    for number in count():
        key, first, second = (b"of this test", number), object(), object()
        imports.acquire(first, key, event.handle, 0)
        acquired = _acquired_behind(number, first, second, key, event.handle)
        for handle in acquired:
            assert _drivers.load().cuEventQuery(handle) == (_drivers.SUCCESS,)
            assert imports._users[key] == {second}
            imports.release(second, key)
        assert key not in imports._events
        assert key not in imports._users
        if not acquired:
            assert number > 1, "it is acquired behind each call"
            break


def _acquired_behind(
    number: int, first: object, second: object, key: tuple[bytes, int], handle: bytes
) -> list[DriverObject]:
    """What `second` has acquired behind that call of the release by `first`; empty if that makes fewer calls."""
    returns, acquired = count(), []

    def profile(frame: FrameType, what: str, _: object) -> None:
        if what == "c_return" and frame.f_code is imports._release.__code__ and next(returns) == number:
            sys.setprofile(None)
            acquired.append(imports.acquire(second, key, handle, 0))

    sys.setprofile(profile)
    try:
        imports.release(first, key)
    finally:
        sys.setprofile(None)
    return acquired
