"""One wait of those that a thread looks at, and threads that look at it at once."""

from __future__ import annotations

from typing import Any

from ipcsync._session.waits import Pending
from ipcsync.errors import RecorderLost


class _Engine:
    """One whose recorder is lost for the first that asks, and lives for the others, as before."""

    label = "'e'"

    def __init__(self, lost: RecorderLost) -> None:
        self._errors = [lost]

    def query(self, _generation: int, _may_block: bool) -> bool:
        if self._errors:
            raise self._errors.pop()
        return False

    def check_liveness(self, _generation: int) -> None: ...


def test_a_look_that_began_before_a_wait_ended_leaves_it_its_error() -> None:
    """A thread that was replaced may come to it late: without the error, the wait would end as if it were complete."""
    lost, told = RecorderLost("lost"), list[Exception | None]()
    engine: Any = _Engine(lost)
    pending = Pending(engine, 1)
    pending.notify, pending.is_callback = told.append, False
    assert pending.has_ended()
    assert not pending.has_ended()
    pending.end()
    assert told == [lost]
