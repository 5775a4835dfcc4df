"""What two processes try together, over a coordinator: each engine, the release of waiters, and a recorder's death.

Each trial returns what it found; TrialError says why it could not be carried through.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ipcsync.cli.doctor.crew import Crew, TrialError
from ipcsync.typing import EngineName

_RELEASE_S = 2.0  # the coordinator, and drivers that do it, let go on within a tenth of this


@dataclass(frozen=True)
class Death:
    """What came of a killed recorder: what the waiter was told, and whether its stream went on."""

    told: str
    stream_goes_on: bool


def _name(what: str) -> str:
    return f"ipcsync-doctor/{os.urandom(6).hex()}/{what}"


def hand_over(crew: Crew, endpoint: str, engine: EngineName, device: int) -> None:
    """A record behind a held stream in one process, waited for by a stream of another. TrialError if it fails."""
    name = _name("hand-over")
    recorder, waiter = crew["recorder"], crew["waiter"]
    recorder.call("open_recorder", endpoint=endpoint, name=name, engine=engine, device=device)
    recorder.call("record", name=name)
    waiter.call("join", endpoint=endpoint, name=name, device=device, generation=1, ahead=False)
    if not waiter.call("is_held", name=name):
        raise TrialError("the waiting stream did not wait for the other process's unfinished work")
    recorder.call("let_go", name=name)
    if engine == "timeline" and not recorder.call("completed_here", name=name, generation=1):
        raise TrialError("what the recorder's stream wrote to the board is not seen by the CPU")
    if not waiter.call("goes_on", name=name):
        raise TrialError("the waiting stream did not go on when the other process's work was done")
    told = waiter.call("outcome", name=name, generation=1)
    if told != "complete":
        raise TrialError(f"the waiter was told {told!r} of what is complete")
    waiter.call("leave", name=name)
    recorder.call("close_recorder", name=name)


def release(crew: Crew, endpoint: str) -> bool:
    """Whether a stream that waits ahead goes on when the coordinator releases it, which it does by a plain store."""
    name = _name("release")
    recorder, waiter = crew["recorder"], crew["waiter"]
    recorder.call("open_recorder", endpoint=endpoint, name=name, engine="timeline", device=0)
    waiter.call("join", endpoint=endpoint, name=name, device=0, generation=1, ahead=True)
    recorder.call("close_recorder", name=name)
    woke: bool = waiter.call("goes_on", name=name)
    if woke:
        waiter.call("leave", name=name)
    else:
        waiter.kill()  # its stream can never go on
    return woke


def death(crew: Crew, endpoint: str, engine: EngineName) -> Death:
    """Kill a recorder by SIGKILL while its work is unfinished, with a stream of another process waiting for it."""
    name = _name("death")
    victim, waiter = crew["victim"], crew["bereaved"]
    victim.call("open_recorder", endpoint=endpoint, name=name, engine=engine, device=0)
    victim.call("record", name=name)
    waiter.call("join", endpoint=endpoint, name=name, device=0, generation=1, ahead=False)
    if not waiter.call("is_held", name=name):
        raise TrialError("the waiting stream did not wait for the other process's unfinished work")
    victim.kill()
    told = waiter.call("outcome", name=name, generation=1)
    goes_on: bool = waiter.call("goes_on", name=name, seconds=_RELEASE_S)
    if goes_on:
        waiter.call("leave", name=name)
    else:
        waiter.kill()  # its stream can never go on
    return Death(told, goes_on)
