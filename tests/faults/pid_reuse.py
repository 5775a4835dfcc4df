"""A pid that comes again at once: run in a `ForeignPeer` that is alone, where a pid may be chosen.

The counter that the kernel gives pids from belongs to a namespace. Set back in the one that everybody shares, it would
give strangers' pids out again early, and a signal meant for a process that has ended could hit another one.
"""

from __future__ import annotations

import os
import tempfile

import ipcsync
from ipcsync._linux.process import pid_namespace
from ipcsync.typing import EngineName
from tests.faults import actions, fixtures
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S

_LAST_PID = "/proc/sys/kernel/ns_last_pid"
_TRIES = 50


def why_not(outer_namespace: int) -> str | None:
    """Why no pid can be chosen here, None if one can. AssertionError in the namespace `outer_namespace`."""
    assert pid_namespace() != outer_namespace, "a pid is chosen in a namespace of its own only"
    assert tempfile.gettempdir() == "/dev/shm/tmp", "and where nobody else's files are"
    try:
        with open(_LAST_PID, "r+") as file:
            file.write(file.read().strip())
    except OSError as error:
        return f"a pid cannot be chosen here: {error.strerror}"
    return None


def _peer_with_pid(pid: int, outer_namespace: int) -> Peer:
    assert pid_namespace() != outer_namespace
    for _ in range(_TRIES):
        with open(_LAST_PID, "w") as file:
            file.write(str(pid - 1))
        peer = Peer()
        if peer.pid == pid:
            return peer
        peer.kill()  # a thread or process of this namespace was faster
    raise AssertionError(f"pid {pid} was not to be had in {_TRIES} tries")


def scenario(engine: EngineName, outer_namespace: int) -> dict[str, object]:
    """A recorder dies, and its pid comes again before the coordinator, which is stopped, learns of the death."""
    with ipcsync.launch() as coordinator, ipcsync.connect(coordinator.endpoint, name="main") as client:
        recorder = Peer()
        recorder.call(actions.open_recorder, coordinator.endpoint, "e", engine)
        recorder.call(remote.hold)
        point = client.point(recorder.call(actions.record, "e"))
        was_complete = point.query()
        fixtures.stop(coordinator.pid)
        recorder.kill()
        reborn = _peer_with_pid(recorder.pid, outer_namespace)
        before = actions.error_of(point.synchronize, DEADLINE_S)
        fixtures.resume(coordinator.pid)
        fixtures.until_lost(client, "pidfd")
        reborn.call(actions.open_recorder, coordinator.endpoint, "e", engine)  # the name is free
        sessions = {info.name: info.pid for info in client.list_sessions()}
        found: dict[str, object] = {
            "complete while it lived": was_complete,
            "before the coordinator knew": before,
            "afterwards": actions.error_of(point.query),
            "the new session has the old pid": sessions["recorder"] == recorder.pid != os.getpid(),
            "deaths": client.stats()["deaths"],
        }
        fixtures.finish(client.point(reborn.call(actions.record_complete, "e")))
        reborn.kill()
        recorder.close()
    return found
