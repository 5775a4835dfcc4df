"""Checks with two processes over a coordinator: each engine, the release of waiters, and a recorder's death.

CheckFailed says why one could not be completed.
"""

from __future__ import annotations

import os

from ipcsync.cli.doctor import actions
from ipcsync.cli.doctor.workers import CheckFailed, Worker, Workers
from ipcsync.typing import EngineName

_RELEASE_S = 2.0  # the coordinator, and drivers that release, take less than a tenth of this


def _name() -> str:
    return f"ipcsync-doctor/{os.urandom(6).hex()}"


def _wait_behind(recorder: Worker, waiter: Worker, endpoint: str, engine: EngineName, device: int) -> None:
    """A record behind a held stream in one process, waited for by a stream of another. CheckFailed if it does not."""
    name = _name()
    recorder.call(actions.open_recorder, endpoint=endpoint, name=name, engine=engine, device=device, records=True)
    if not waiter.call(actions.join, endpoint=endpoint, name=name, device=device, ahead=False):
        raise CheckFailed("the waiting stream did not wait for the other process's unfinished work")


def _finish(waiter: Worker, seconds: float) -> tuple[str, bool]:
    """The waiter's outcome, and whether its stream goes on by itself; a process is killed whose stream never will."""
    outcome, goes_on = waiter.call(actions.finish, seconds=seconds)
    if not goes_on:
        waiter.kill()
    return outcome, goes_on


def hand_over(workers: Workers, endpoint: str, engine: EngineName, device: int) -> None:
    """A record in one process that a stream of another waits for, and goes on behind. CheckFailed if it fails."""
    recorder, waiter = workers["recorder"], workers["waiter"]
    _wait_behind(recorder, waiter, endpoint, engine, device)
    if not recorder.call(actions.release):
        raise CheckFailed("the CPU does not see what the recorder's stream wrote to the board")
    outcome, goes_on = _finish(waiter, actions.SOON_S)
    if not goes_on:
        raise CheckFailed("the waiting stream did not go on when the other process's work was done")
    if outcome != "complete":
        raise CheckFailed(f"the waiter got {outcome!r} for work that is complete")
    recorder.call(actions.close)


def release(workers: Workers, endpoint: str) -> bool:
    """Whether a stream that waits ahead goes on when the coordinator releases it, which it does by a plain store."""
    name, recorder, waiter = _name(), workers["recorder"], workers["waiter"]
    recorder.call(actions.open_recorder, endpoint=endpoint, name=name, engine="timeline", device=0, records=False)
    waiter.call(actions.join, endpoint=endpoint, name=name, device=0, ahead=True)
    recorder.call(actions.close)
    return _finish(waiter, actions.SOON_S)[1]


def death(workers: Workers, endpoint: str, engine: EngineName) -> tuple[str, bool]:
    """Kill a recorder by SIGKILL amid its work, for which a stream of another process waits.

    The waiter's outcome, and whether its stream went on.
    """
    victim, waiter = workers["victim"], workers["bereaved"]
    _wait_behind(victim, waiter, endpoint, engine, 0)
    victim.kill()
    return _finish(waiter, _RELEASE_S)
