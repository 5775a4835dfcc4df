"""Row 66: this process's own work stands behind the work of a dead recorder, for which its streams wait for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ipcsync
from ipcsync.typing import EngineName
from tests.faults import actions, standing_actions
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S

pytestmark = pytest.mark.driver

NewPeer = Callable[..., Peer]
_PENDING = {"IPCSYNC_HOST_DEATH": "pending"}  # as on a GPU; read by the process whose stream waits


@pytest.fixture
def recorder(coordinator: ipcsync.Coordinator, new_peer: NewPeer) -> Peer:
    """A process with a record that is not complete until it opens its gate."""
    peer = new_peer()
    peer.call(actions.connect, coordinator.endpoint, "recorder")
    peer.call(remote.hold)
    return peer


def _held_record(recorder: Peer, engine: EngineName) -> bytes:
    recorder.call(actions.open_event, "kv", engine)
    return recorder.call(actions.record, "kv")


@pytest.fixture
def waiter(new_peer: NewPeer) -> Peer:
    return new_peer(**_PENDING)


@pytest.mark.parametrize("when", ["blocked by then", "called later"])
@pytest.mark.parametrize("call", standing_actions.CALLS)
def test_row_66_a_wait_for_work_behind_a_dead_recorder_raises(
    coordinator: ipcsync.Coordinator, recorder: Peer, waiter: Peer, call: str, when: str
) -> None:
    waiter.call(standing_actions.wait_for, coordinator.endpoint, _held_record(recorder, "event"))
    if when == "blocked by then":
        waiter.begin(standing_actions.outcome, call)
        assert not waiter.has_result
    recorder.kill()
    if when == "called later":
        waiter.begin(standing_actions.outcome, call)
    kind, cause, pid, text = waiter.result()
    assert (kind, cause, pid) == ("RecorderLost", "behind", recorder.pid)
    assert f"generation 1 of 'kv', whose recorder 'recorder' (pid {recorder.pid}) died" in text
    assert waiter.call(standing_actions.others_end)
    kind, _, pid, _ = waiter.call(standing_actions.outcome, call, DEADLINE_S)  # again, and with a timeout
    assert (kind, pid) == ("RecorderLost", recorder.pid)


@pytest.mark.parametrize("call", standing_actions.CALLS)
def test_row_66_on_the_engine_timeline_it_ends(
    coordinator: ipcsync.Coordinator, recorder: Peer, waiter: Peer, call: str
) -> None:
    waiter.call(standing_actions.wait_for, coordinator.endpoint, _held_record(recorder, "timeline"))
    waiter.begin(standing_actions.outcome, call)
    recorder.kill()
    assert waiter.result() == ("", "", 0, "")


@pytest.mark.parametrize("call", standing_actions.CALLS)
def test_row_66_until_then_it_waits_for_the_recorder_and_at_most_for_its_timeout(
    coordinator: ipcsync.Coordinator, recorder: Peer, waiter: Peer, engine: EngineName, call: str
) -> None:
    waiter.call(standing_actions.wait_for, coordinator.endpoint, _held_record(recorder, engine))
    kind, timeout, _, text = waiter.call(standing_actions.outcome, call, 0.1)
    assert (kind, timeout) == ("WaitTimeout", "0.1")
    assert text.endswith("was not done within 0.1 s: it stands behind generation 1 of 'kv'")
    waiter.begin(standing_actions.outcome, call)
    recorder.call(remote.let_go)
    assert waiter.result() == ("", "", 0, "")


def test_row_66_the_loss_of_a_chain_names_who_died(
    coordinator: ipcsync.Coordinator, recorder: Peer, new_peer: NewPeer
) -> None:
    second, third = new_peer(**_PENDING), new_peer(**_PENDING)
    second.call(standing_actions.wait_for, coordinator.endpoint, _held_record(recorder, "event"))
    third.call(standing_actions.wait_for, coordinator.endpoint, second.call(standing_actions.record_behind, "second"))
    third.begin(standing_actions.outcome, "Stream.synchronize")
    recorder.kill()
    kind, cause, pid, text = third.result()
    assert (kind, cause, pid) == ("RecorderLost", "behind", recorder.pid)
    assert "generation 1 of 'second'" in text


def test_row_66_a_stream_stands_behind_a_record_that_its_own_one_follows(
    coordinator: ipcsync.Coordinator, recorder: Peer, waiter: Peer
) -> None:
    waiter.call(standing_actions.wait_for, coordinator.endpoint, _held_record(recorder, "event"))
    waiter.call(standing_actions.record_behind, "second")
    waiter.call(standing_actions.record_on_another_stream, "second")
    recorder.kill()
    kind, _, pid, text = waiter.call(standing_actions.outcome, standing_actions.ANOTHER, DEADLINE_S / 2)
    assert (kind, pid) == ("RecorderLost", recorder.pid)
    assert "generation 1 of 'second'" in text
    assert len(waiter.call(standing_actions.said_at_exit)) == 2, "each stream stands still, behind another loss"


def test_row_66_a_process_says_at_its_exit_which_stream_stands_still_and_behind_whom(
    coordinator: ipcsync.Coordinator, recorder: Peer
) -> None:
    data = _held_record(recorder, "event")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.standing_program", coordinator.endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **_PENDING},
        cwd=Path(__file__).parents[2],
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stderr is not None
        try:
            program.stdin.write(data.hex() + "\n")
            program.stdin.flush()
            assert program.stdout.readline() == "waits\n"
            recorder.kill()
            assert program.stdout.readline() == "lost\n"
            said = program.stderr.readline()
            assert said.startswith("at exit, the stream with the id ")
            assert f"stands still behind generation 1 of 'kv', whose recorder 'recorder' (pid {recorder.pid})" in said
        finally:
            program.kill()  # the exit itself is the driver's
