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


def _goes_on(waiter: Worker, seconds: float) -> bool:
    """Whether the waiting stream goes on by itself; a process is killed whose stream can never go on."""
    goes_on: bool = waiter.call(actions.goes_on, seconds=seconds)
    if goes_on:
        waiter.call(actions.close)
    else:
        waiter.kill()
    return goes_on


def hand_over(workers: Workers, endpoint: str, engine: EngineName, device: int) -> None:
    """A record in one process that a stream of another waits for, and goes on behind. CheckFailed if it fails."""
    recorder, waiter = workers["recorder"], workers["waiter"]
    _wait_behind(recorder, waiter, endpoint, engine, device)
    if not recorder.call(actions.release):
        raise CheckFailed("the CPU does not see what the recorder's stream wrote to the board")
    if not waiter.call(actions.goes_on):
        raise CheckFailed("the waiting stream did not go on when the other process's work was done")
    outcome = waiter.call(actions.outcome)
    if outcome != "complete":
        raise CheckFailed(f"the waiter got {outcome!r} for work that is complete")
    waiter.call(actions.close)
    recorder.call(actions.close)


def release(workers: Workers, endpoint: str) -> bool:
    """Whether a stream that waits ahead goes on when the coordinator releases it, which it does by a plain store."""
    name, recorder, waiter = _name(), workers["recorder"], workers["waiter"]
    recorder.call(actions.open_recorder, endpoint=endpoint, name=name, engine="timeline", device=0, records=False)
    waiter.call(actions.join, endpoint=endpoint, name=name, device=0, ahead=True)
    recorder.call(actions.close)
    return _goes_on(waiter, actions.SOON_S)


def death(workers: Workers, endpoint: str, engine: EngineName) -> tuple[str, bool]:
    """Kill a recorder by SIGKILL amid its work, for which a stream of another process waits.

    The waiter's outcome, and whether its stream went on.
    """
    victim, waiter = workers["victim"], workers["bereaved"]
    _wait_behind(victim, waiter, endpoint, engine, 0)
    victim.kill()
    return waiter.call(actions.outcome), _goes_on(waiter, _RELEASE_S)
