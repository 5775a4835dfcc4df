"""Checks with two processes over a coordinator: each engine, the release of waiters, and a recorder's death.

Each check returns its finding; CheckFailed says why it could not be completed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ipcsync.cli.doctor import actions
from ipcsync.cli.doctor.workers import CheckFailed, Worker, Workers
from ipcsync.typing import EngineName

_RELEASE_S = 2.0  # the coordinator, and drivers that release, take less than a tenth of this


@dataclass(frozen=True)
class Death:
    """The result of a recorder's death: the waiter's outcome, and whether its stream went on."""

    outcome: str
    stream_goes_on: bool


def _name(what: str) -> str:
    return f"ipcsync-doctor/{os.urandom(6).hex()}/{what}"


def _wait_behind(recorder: Worker, waiter: Worker, endpoint: str, name: str, engine: EngineName, device: int) -> None:
    """A record behind a held stream in one process, waited for by a stream of another. CheckFailed if it does not."""
    recorder.call(actions.open_recorder, endpoint=endpoint, name=name, engine=engine, device=device)
    recorder.call(actions.record, name=name)
    waiter.call(actions.join, endpoint=endpoint, name=name, device=device, generation=1, ahead=False)
    if not waiter.call(actions.is_held, name=name):
        raise CheckFailed("the waiting stream did not wait for the other process's unfinished work")


def _goes_on(waiter: Worker, name: str, seconds: float) -> bool:
    """Whether the waiting stream goes on by itself; a process is killed whose stream can never go on."""
    goes_on: bool = waiter.call(actions.goes_on, name=name, seconds=seconds)
    if goes_on:
        waiter.call(actions.close, name=name)
    else:
        waiter.kill()
    return goes_on


def hand_over(workers: Workers, endpoint: str, engine: EngineName, device: int) -> None:
    """A record in one process that a stream of another waits for, and goes on behind. CheckFailed if it fails."""
    name = _name("hand-over")
    recorder, waiter = workers["recorder"], workers["waiter"]
    _wait_behind(recorder, waiter, endpoint, name, engine, device)
    recorder.call(actions.release, name=name)
    if engine == "timeline" and not recorder.call(actions.completed_here, name=name, generation=1):
        raise CheckFailed("the CPU does not see what the recorder's stream wrote to the board")
    if not waiter.call(actions.goes_on, name=name):
        raise CheckFailed("the waiting stream did not go on when the other process's work was done")
    outcome = waiter.call(actions.outcome, name=name, generation=1)
    if outcome != "complete":
        raise CheckFailed(f"the waiter got {outcome!r} for work that is complete")
    waiter.call(actions.close, name=name)
    recorder.call(actions.close, name=name)


def release(workers: Workers, endpoint: str) -> bool:
    """Whether a stream that waits ahead goes on when the coordinator releases it, which it does by a plain store."""
    name = _name("release")
    recorder, waiter = workers["recorder"], workers["waiter"]
    recorder.call(actions.open_recorder, endpoint=endpoint, name=name, engine="timeline", device=0)
    waiter.call(actions.join, endpoint=endpoint, name=name, device=0, generation=1, ahead=True)
    recorder.call(actions.close, name=name)
    return _goes_on(waiter, name, actions.SOON_S)


def death(workers: Workers, endpoint: str, engine: EngineName) -> Death:
    """Kill a recorder by SIGKILL while its work is unfinished, with a stream of another process waiting for it."""
    name = _name("death")
    victim, waiter = workers["victim"], workers["bereaved"]
    _wait_behind(victim, waiter, endpoint, name, engine, 0)
    victim.kill()
    outcome = waiter.call(actions.outcome, name=name, generation=1)
    return Death(outcome, _goes_on(waiter, name, _RELEASE_S))
