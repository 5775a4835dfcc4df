"""What `Client.check` says of the engines between a process and its coordinator."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync._session import driving
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineChecks
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

pytestmark = pytest.mark.driver

WORKS = {"ok": True, "why": ""}


def test_both_engines_work_between_processes_of_one_machine(client: ipcsync.Client) -> None:
    assert client.check() == {"event": WORKS, "timeline": WORKS}


def test_a_check_is_of_the_device_that_is_named(client: ipcsync.Client) -> None:
    assert client.check(0) == client.check("cuda:0") == client.check(ipcsync.Device(0))
    with pytest.raises(ipcsync.InvalidDevice):
        client.check(ipcsync.device_count())
    with pytest.raises(ipcsync.InvalidDevice):
        client.check("cpu")


def test_a_check_leaves_nothing_behind_and_waits_for_nobodys_work(client: ipcsync.Client) -> None:
    stream = ipcsync.Stream()
    client.check()
    before = client.stats()
    with StreamGate(stream):
        for _ in range(5):
            client.check()
    after = client.stats()
    for count in ("events", "pool_in_use", "sessions"):
        assert after[count] == before[count]


def test_of_threads_that_try_words_at_a_time_none_pulls_down_what_another_one_wrote(
    new_client: Callable[..., ipcsync.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, passes, found = new_client(), driving._passes, list[str]()
    tried: list[int] = []
    others = [
        threading.Thread(target=lambda: found.append(client.check()["timeline"]["why"])),
        threading.Thread(target=lambda: found.append(client.event("second", recorder=True).engine)),
    ]

    def is_kept_out(thread: threading.Thread) -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        return frame is not None and frame.f_code.co_name == "_take"

    def pass_while_others_come(*arguments: Any) -> bool:
        tried.append(threading.get_ident())
        if len(tried) == 1:
            for other in others:
                other.start()
            until(lambda: len(tried) > 1 or all(map(is_kept_out, others)), "the others to come")
            assert len(tried) == 1
        return passes(*arguments)

    monkeypatch.setattr(driving, "_passes", pass_while_others_come)
    assert client.event("first", recorder=True).engine == "timeline"
    for other in others:
        other.join(DEADLINE_S)
    assert sorted(found) == ["", "timeline"]
    assert len(tried) == 2, "for the events once, and for the check"


def _check() -> EngineChecks:
    return remote.client().check()


def test_another_process_finds_the_same(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, new_peer: Callable[..., Peer]
) -> None:
    peer = new_peer()
    peer.call(remote.connect, coordinator.endpoint)
    assert peer.call(_check) == client.check()


def test_a_closed_client_checks_nothing(client: ipcsync.Client) -> None:
    client.close()
    with pytest.raises(ipcsync.ClientClosed):
        client.check()
