"""An event is closed in the middle of a call that closes or opens the same one, as a signal's handler may: row 42."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import ipcsync
from tests.faults.interrupting import called_within, is_refusal
from tests.kit.until import until

pytestmark = pytest.mark.process

_CALLS: dict[str, Callable[[ipcsync.Client, ipcsync.SharedEvent, bytes], object]] = {
    "close": lambda _client, event, _data: event.close(),
    "open": lambda client, event, _data: client.event(event.name).close(),
    "point": lambda client, _event, data: client.point(data).query(),
    "copy": lambda _client, event, _data: event.__copy__().close(),
}


_MAY_BE_CLOSED = {"point", "copy"}  # those that need an object which a close within them ends

# Of so many points, one.
_EVERY = {
    ("close", "close"): 1,
    ("open", "close"): 1,
    ("close", "open"): 5,
    ("close", "point"): 5,
    ("point", "close"): 5,
    ("copy", "close"): 5,
}


@pytest.mark.parametrize(("call", "within"), _EVERY)
def test_row_42_a_close_anywhere_within_another_call_on_the_event_does_no_harm(
    new_client: Callable[..., ipcsync.Client], call: str, within: str
) -> None:
    recorder, waiter = new_client(), new_client()
    stream = ipcsync.Stream()
    number, points = 1, 1
    wrong: list[str] = []
    while points >= number:
        number += _EVERY[call, within]
        event = recorder.event(f"e{number}", recorder=True, engine="timeline")
        data = bytes(event.record(stream))
        seen = waiter.event(event.name)

        def inner(seen: Any = seen, data: Any = data) -> None:
            try:
                _CALLS[within](waiter, seen, data)
            except BaseException as error:  # noqa: BLE001 - it is told
                if not is_refusal(within, error):
                    wrong.append(f"{within}: {error!r}")

        def outer(seen: Any = seen, data: Any = data) -> None:
            with suppress(*([ipcsync.EventClosed] if call in _MAY_BE_CLOSED else [])):
                _CALLS[call](waiter, seen, data)

        outcome = called_within(outer, number, "line", inner)
        assert outcome.error is None, f"{outcome.error!r} at {outcome.stack}"
        assert not wrong, f"{wrong} at {outcome.stack}"
        points = outcome.points
        seen.close()
        event.close()
    assert number > 20
    until(lambda: not recorder.stats()["quarantined"], "every slot is free again")
    assert not waiter.list_attachments()
