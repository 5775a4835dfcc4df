"""How a soak's worker does something, and writes down how it ended."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.soak.history import History, Op, Record, Result, path_of, result_of
from tests.soak.oracle import Truth
from tests.soak.session import NOBODY, Known

T = TypeVar("T")

_MOST_FAULTS = 10
_ENDS_OF_SESSION = (Result.SESSION_EXPIRED, Result.COORDINATOR_LOST, Result.CLIENT_CLOSED)


class Notes:
    """The history of one life, as it is written. `on_end` is told when a call showed that the session is over."""

    def __init__(self, directory: Path, life: int, truth: Truth, on_end: Callable[[], None]) -> None:
        self._truth = truth
        self._on_end = on_end
        self._path = path_of(directory, life)
        self._history = History(self._path)
        self._faults = 0

    def write(self, record: Record) -> None:
        """Write a record as it is."""
        self._history.write(record)

    def state(self, op: Op, result: Result, *, known: Known | None = None, **fields: int) -> None:
        """Write a record of something that is no call, as of now."""
        now = time.monotonic_ns()
        record = Record(op, result, start=now, end=now) if known is None else self._blank(op, known, now)
        self._history.write(record._replace(result=result, **fields))

    def attempt(self, record: Record, call: Callable[[], T], *, blocks: bool = True) -> tuple[Record, T | None]:
        """Do something, and give the record of it filled in but for what only its value tells: to be written then.

        What may block is written before, too.
        """
        record = record._replace(start=time.monotonic_ns())
        if blocks:
            self._history.write(record._replace(result=Result.BEGUN, end=record.start))
        value: T | None = None
        result = Result.OK
        try:
            value = call()
        except Exception as error:  # noqa: BLE001 - judged by the checker
            result = result_of(error)
            if result == Result.OTHER:
                self.explain(error)
            if result in _ENDS_OF_SESSION:
                self._on_end()
        return record._replace(result=result, end=time.monotonic_ns()), value

    def judge(self, op: Op, known: Known, call: Callable[[], object], timeout: float | None = None) -> Result:
        """A call on a point, written down with the truth as it is right afterwards."""
        blank = self._blank(op, known)._replace(timeout_ms=int((timeout or 0) * 1000))
        record, value = self.attempt(blank, call, blocks=timeout is not None)
        if op is Op.QUERY and record.result == Result.OK and value is False:
            record = record._replace(result=Result.NOT_YET)
        self.learn(known)
        truth = self._truth.read(known.cell) if known.cell != NOBODY else 0
        self._history.write(record._replace(tag=known.tag, truth=truth))
        return Result(record.result)

    def learn(self, known: Known) -> None:
        """Find out which use a point is of, if its recorder has come."""
        if known.cell == NOBODY:
            found = self._truth.find(known.key[0], known.key[1])
            if found is not None:
                known.tag, known.cell = found

    @staticmethod
    def _blank(op: Op, known: Known, now: int = 0) -> Record:
        return Record(
            op, Result.OK, known.name, *known.key, start=now, end=now, tag=known.tag, held=known.held,
            engine=known.engine,
        )  # fmt: skip

    def explain(self, error: BaseException) -> None:
        """Keep a traceback beside the history; a life with too many of them ends."""
        self._faults += 1
        if self._faults > _MOST_FAULTS:
            raise RuntimeError("too many errors that should not be") from error
        with open(self._path.with_suffix(".errors"), "a") as file:
            traceback.print_exception(error, file=file)

    def close(self) -> None:
        """Close the history."""
        self._history.close()
