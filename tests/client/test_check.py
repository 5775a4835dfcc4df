"""What `Client.check` says of the engines between a process and its coordinator."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineChecks
from tests.kit import remote
from tests.kit.peer import Peer

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
