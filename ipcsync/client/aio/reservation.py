"""Reservations for asyncio. They wrap the ones without `Async` in their names: see `aio.client`."""

from __future__ import annotations

from collections.abc import Iterable

from ipcsync._closing import AsyncClosing
from ipcsync._native import fork
from ipcsync._native.stream import resolve
from ipcsync.client.aio._runner import Runner, run_alone
from ipcsync.client.aio.event import AsyncPoint, attached
from ipcsync.client.reservation import Reservation
from ipcsync.typing import StreamLike


class AsyncReservation(AsyncClosing):
    """One record that this session will make, for asyncio; see `Reservation`. Made by `AsyncClient.reserve`.

    An asynchronous context manager that closes it.
    """

    def __init__(self, reservation: Reservation, runner: Runner) -> None:
        self._reservation = reservation
        self._runner = runner

    @property
    def point(self) -> AsyncPoint:
        """The point of the record, made already or not."""
        return AsyncPoint(self._reservation.point, self._runner)

    async def record(self, stream: StreamLike | None = None, *, after: Iterable[AsyncPoint] = ()) -> AsyncPoint:
        """Record after all work submitted to `stream` so far, once; as `Reservation.record`."""
        chosen = resolve(stream, self._reservation.point.device.index)
        points = await attached(after)
        await self._runner.all_recorded(points)
        return AsyncPoint(self._reservation.record(chosen, after=points), self._runner)

    async def close(self) -> None:
        """Close it, as `Reservation.close`. If it is cancelled, the close goes on."""
        if not fork.is_in_bad_fork():
            await run_alone(self._reservation.close, surely=True)

    def __repr__(self) -> str:
        return repr(self._reservation).replace("Reservation", "AsyncReservation", 1)
