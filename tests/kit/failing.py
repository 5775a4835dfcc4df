"""A call on a thread of its own that is to fail."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Failing(threading.Thread):
    """Runs a function that is to raise; `error` is what it raised."""

    def __init__(self, fn: Callable[[], object]) -> None:
        super().__init__()
        self._fn = fn
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._fn()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def raised(self) -> BaseException | None:
        """Its error, once it has ended."""
        self.join(15)
        assert not self.is_alive(), "the wait did not end"
        return self.error
