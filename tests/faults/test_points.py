"""Handles and points that name nothing, or not what they seem to: rows 36 and 39."""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Callable

import pytest

import ipcsync
from ipcsync._wire.codec import PointKey, pack
from ipcsync.typing import EngineName
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = [pytest.mark.driver, pytest.mark.keeper]

NewCoordinator = Callable[..., ipcsync.Coordinator]

# --- row 36 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 63, 65, 128])
def test_row_36_a_handle_of_another_length_is_a_typed_error(size: int) -> None:
    with pytest.raises(ipcsync.HandleError, match=f"size 64, but got {size}"):
        ipcsync.Event.from_ipc_handle(0, os.urandom(size))


@pytest.mark.parametrize("handle", [bytes(64), b"\xff" * 64, os.urandom(64)], ids=["zeros", "ones", "noise"])
def test_row_36_a_handle_of_zeros_or_noise_is_a_typed_error(handle: bytes) -> None:
    with pytest.raises(ipcsync.HandleError) as caught:
        ipcsync.Event.from_ipc_handle(0, handle)
    assert caught.value.code != 0
    assert caught.value.call == "cuIpcOpenEventHandle"


def test_row_36_a_handle_opened_in_its_own_process_is_a_typed_error() -> None:
    event = ipcsync.Event(interprocess=True)
    event.record(ipcsync.Stream())
    with pytest.raises(ipcsync.HandleError, match="this process exported the handle itself") as caught:
        ipcsync.Event.from_ipc_handle(0, event.ipc_handle())
    assert caught.value.code == 201
    event.synchronize()


_exported: list[ipcsync.Event] = []


def _export() -> bytes:
    """In the peer."""
    event = ipcsync.Event(interprocess=True)
    event.record(ipcsync.Stream())
    _exported.append(event)
    return event.ipc_handle()


def test_row_36_a_handle_whose_bytes_were_changed_is_a_typed_error(peer: Peer) -> None:
    handle = peer.call(_export)
    opened = ipcsync.Event.from_ipc_handle(0, handle)
    opened.synchronize()
    del opened
    for index in (0, 8, 31):
        changed = bytearray(handle)
        changed[index] ^= 0x5A
        with contextlib.suppress(ipcsync.HandleError):  # or the byte means nothing to the driver
            ipcsync.Event.from_ipc_handle(0, changed).synchronize()


def _open_on_other_devices(handle: bytes) -> list[str]:
    """In a peer with two devices: what opening on each of them gives."""
    return [_open_on(device, handle) for device in (0, 1, 2)]


def _open_on(device: int, handle: bytes) -> str:
    try:
        event = ipcsync.Event.from_ipc_handle(device, handle)
    except ipcsync.IpcSyncError as error:
        return type(error).__name__
    event.synchronize()
    return str(event.device)


@pytest.mark.skipif(os.environ["IPCSYNC_DRIVER"] != "host", reason="only the software driver makes up a second device")
def test_row_36_a_handle_opened_on_another_gpu_is_typed_and_never_another_event(new_peer: Callable[..., Peer]) -> None:
    exporter, importer = new_peer(IPCSYNC_HOST_DEVICES="2"), new_peer(IPCSYNC_HOST_DEVICES="2")
    handle = exporter.call(_export)
    first, second, third = importer.call(_open_on_other_devices, handle)
    assert first == "cuda:0"
    # CUDA itself may open it with another device current; an error has to be typed.
    assert second in ("cuda:0", "cuda:1", "HandleError", "DeviceMismatch")
    assert third == "InvalidDevice"


# --- row 39 -----------------------------------------------------------------------------------------------------------


def _noise() -> list[bytes]:
    good = pack(PointKey(bytes(16), 1, 1, 1))
    flipped = [bytes([*good[:index], good[index] ^ 1, *good[index + 1 :]]) for index in range(48)]
    body = struct.pack("<4sI16sQQI", b"ipc1", 1, bytes(16), 1, 0, 0)  # generation 0
    unborn = body + struct.pack("<I", zlib.crc32(body))
    return [b"", bytes(48), os.urandom(48), good[:47], good + b"\x00", unborn, *flipped]


def test_row_39_noise_and_47_and_49_bytes_are_typed_errors(client: ipcsync.Client) -> None:
    asked = client.messages_sent
    for data in _noise():
        with pytest.raises(ipcsync.ProtocolError) as caught:
            client.point(data)
        assert caught.value.code == "point"
    for wrong in (None, "x" * 48, 48, [0] * 48):
        with pytest.raises(TypeError):
            client.point(wrong)  # type: ignore[arg-type] # that is what is tried
    assert client.messages_sent == asked


@pytest.mark.parametrize("engine", ["event", "timeline"])
def test_row_39_a_point_of_an_old_incarnation_is_refused_for_ever_and_never_anothers(
    new_coordinator: NewCoordinator, engine: EngineName
) -> None:
    coordinator = new_coordinator(pool=1)
    with ipcsync.connect(coordinator.endpoint) as recorder, ipcsync.connect(coordinator.endpoint) as other:
        old_event = recorder.event("e", recorder=True, engine=engine)
        old = old_event.record(ipcsync.Stream())
        data = bytes(old)
        theirs = other.point(data)
        theirs.synchronize(10)
        old_event.close()
        del theirs
        until(lambda: recorder.stats()["pool_in_use"] == 0, "both have let go")
        new_event = recorder.event("e", recorder=True, engine=engine)  # the only slot there is
        new = new_event.record(ipcsync.Stream())
        new.synchronize(10)
        assert bytes(new)[4:8] == data[4:8]
        assert bytes(new) != data
        for _ in range(2):
            with pytest.raises(ipcsync.RecorderLost, match="is gone"):
                other.point(data)
            for use in (old.query, old.synchronize, lambda: old.wait(ipcsync.Stream()), lambda: old.is_recorded):
                with pytest.raises(ipcsync.EventClosed):
                    use()
        assert new != old
        assert other.point(bytes(new)).query()


@pytest.mark.own_coordinator  # in another one a later slot may have been used
def test_row_39_points_of_events_that_never_were_are_typed_errors(client: ipcsync.Client) -> None:
    point = client.event("e", recorder=True).record(ipcsync.Stream())
    data = bytes(point)
    slot = int.from_bytes(data[4:8], "little")
    keys = [
        PointKey(client.epoch, slot, 2, 1),
        PointKey(client.epoch, slot, 0, 1),
        PointKey(client.epoch, slot, (1 << 64) - 1, 1),
        PointKey(client.epoch, slot + 1, 1, 1),
        PointKey(client.epoch, (1 << 32) - 1, 1, 1),
    ]
    for key in keys:
        with pytest.raises((ipcsync.RecorderLost, ipcsync.ProtocolError)):
            client.point(pack(key))
    later = client.point(pack(PointKey(client.epoch, slot, 1, 1 << 61)))
    assert not later.is_recorded
    assert not later.query()
    assert point.query() in (True, False)


def test_row_39_a_point_of_another_coordinator_is_a_typed_error(
    client: ipcsync.Client, new_coordinator: NewCoordinator
) -> None:
    mine = client.event("e", recorder=True).record(ipcsync.Stream())
    other = new_coordinator()
    with ipcsync.connect(other.endpoint) as elsewhere:
        theirs = elsewhere.event("e", recorder=True).record(ipcsync.Stream())
        for reader, foreign in ((client, theirs), (elsewhere, mine)):
            with pytest.raises(ipcsync.StalePoint, match="this session is healthy"):
                reader.point(bytes(foreign))
        assert mine != theirs
        assert len({mine, theirs, client.point(bytes(mine))}) == 2


def test_row_39_a_point_of_an_old_epoch_is_a_typed_error(
    new_coordinator: NewCoordinator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = str(tmp_path_factory.mktemp("run", numbered=True) / "d")
    first = new_coordinator(runtime_dir=directory)
    with ipcsync.connect(first.endpoint) as client:
        old = client.event("e", recorder=True).record(ipcsync.Stream())
        first.stop()
        with pytest.raises(ipcsync.CoordinatorLost):
            old.query()
    second = new_coordinator(runtime_dir=directory)
    with ipcsync.connect(second.endpoint) as client:
        client.event("e", recorder=True).record(ipcsync.Stream())
        with pytest.raises(ipcsync.StalePoint):
            client.point(bytes(old))
        with pytest.raises((ipcsync.CoordinatorLost, ipcsync.ClientClosed)):
            old.synchronize(1)
