"""Tensors that pass from process to process in buckets: `make test-vllm`. They are of the CPU; the bucket is not."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

import ipcsync
from ipcsync._drivers import unwrap
from ipcsync._native.context import driver
from ipcsync.testing import Memory, StreamGate
from tests.kit.peer import Peer
from tests.kit.until import until

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed: make test-vllm installs it", allow_module_level=True)

import torch

from ipcsync.integrations import buckets

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

_SIZE = 1 << 16
_LAYOUTS = [((_SIZE,), torch.uint8), ((2, 3), torch.bfloat16), ((), torch.int64), ((0, 4), torch.float32)]
_kept: list[object] = []


def _send(value: int) -> buckets.Sent:
    tensors = [torch.full(shape, value, dtype=dtype) for shape, dtype in _LAYOUTS]
    bucket = buckets.bucket_for(buckets.size_of(_LAYOUTS), tensors[0].device)
    _kept.append(bucket)
    return bucket.fill(tensors)


def _imported() -> int:
    """How many pieces of the software driver's device memory a receiver has mapped; it has none of its own."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("softcuda" in line and "~m." in line for line in maps)


def _receive(sent: buckets.Sent, left: int = 0) -> list[list[float]]:
    point = sent.received_point()
    point.synchronize(30)
    tensors = buckets.received(sent, _LAYOUTS, point, torch.device("cpu"))
    assert (_imported(), len(buckets._left)) == (min(left, 1), left), "what is opened twice is mapped once"
    assert [(tuple(t.shape), t.dtype) for t in tensors] == _LAYOUTS
    return [tensor.flatten().tolist()[:6] for tensor in tensors]


def _hold(engine: Literal["event", "timeline"] = "event") -> bytes:
    """A point that is pending until this process is killed."""
    stream = ipcsync.Stream()
    _kept.append(StreamGate(stream))
    return bytes(ipcsync.default_client().record(stream, engine=engine))


def _copy_on_a_stream_that_stands_still(sent: buckets.Sent, held: bytes, pid: int) -> str:
    client = ipcsync.default_client()
    stream, mine = ipcsync.Stream(), Memory(_SIZE, pinned=True)
    client.point(held).wait(stream)
    os.kill(pid, signal.SIGKILL)
    until(lambda: client.point(held).exception() is not None, "its recorder is dead")
    point = sent.received_point()
    try:
        with buckets._opened(sent, _SIZE, point) as address:
            buckets._copy(mine.address, address, _SIZE, stream)
            client.record(stream).synchronize()
    except ipcsync.RecorderLost as lost:
        assert _imported() == 1, "the copy may still be made"
        return str(lost.cause)
    return "not lost"


@pytest.fixture
def three(coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer]) -> list[Peer]:
    """A sender, a receiver, and one that dies."""
    return [new_peer(IPCSYNC_ENDPOINT=coordinator.endpoint, PYTHONWARNINGS="ignore") for _ in range(3)]


def test_tensors_arrive_and_the_bucket_is_closed_behind_their_copy(three: list[Peer]) -> None:
    sender, receiver, _ = three
    for value in (1, 2):
        sent = sender.call(_send, value, timeout=120)
        expected = [[value] * 6, [value] * 6, [value], []]
        assert [receiver.call(_receive, sent, timeout=120) for _ in range(2)] == [expected] * 2


def test_while_a_stream_stands_still_buckets_stay_open_and_nothing_hangs(three: list[Peer]) -> None:
    """Torch would wait here for the stream, with the GIL held, where the last tensor over the memory is freed."""
    sender, receiver, dying = three
    sent, held = sender.call(_send, 1, timeout=120), dying.call(_hold, timeout=120)
    assert receiver.call(_copy_on_a_stream_that_stands_still, sent, held, dying.pid, timeout=60) == "behind"
    assert receiver.call(_receive, sent, 2, timeout=60)[2] == [1], "the process goes on"


def test_an_exception_in_the_wait_keeps_all_that_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(buckets, "_left", [])
    memories = [Memory(8), Memory(8)]
    with monkeypatch.context() as patch:
        patch.setattr(ipcsync, "synchronize", interrupted)
        for memory in memories:
            with pytest.raises(KeyboardInterrupt):
                buckets._close(memory)
    assert buckets._left == memories
    buckets._close(last := Memory(8))
    assert not any(memory.address for memory in (*memories, last))
    assert not buckets._left


def _release_and_receive(sent: buckets.Sent) -> int:
    for gate in _kept:
        assert isinstance(gate, StreamGate)
        gate.open()
    _receive(sent)
    return len(buckets._left)


def test_a_bucket_that_was_left_is_closed_with_a_later_one(three: list[Peer]) -> None:
    sender, receiver, _ = three
    sent = sender.call(_send, 1, timeout=120)
    receiver.call(_hold, timeout=120)
    receiver.call(_receive, sent, 1, timeout=60)
    assert receiver.call(_release_and_receive, sent, timeout=60) == 0


# --- a bucket's next use ----------------------------------------------------------------------------------------------


def _send_in_the_next(value: int) -> buckets.Sent:
    """As `_send`, once the last one was closed."""
    bucket = _kept.pop()
    assert isinstance(bucket, buckets.Bucket)
    bucket.close()
    return _send(value)


def _is_gone(sent: buckets.Sent) -> str:
    with pytest.raises(ipcsync.HandleError) as gone:
        _receive(sent)
    return str(gone.value)


def test_a_closed_bucket_is_filled_again_and_an_older_message_does_not_get_that(three: list[Peer]) -> None:
    sender, receiver, _ = three
    first = sender.call(_send, 1, timeout=120)
    assert receiver.call(_receive, first, timeout=120)[2] == [1]
    second = sender.call(_send_in_the_next, 2, timeout=60)
    assert second.handle == first.handle, "memory is never freed while it may be open elsewhere"
    assert receiver.call(_receive, second, timeout=60)[2] == [2]
    for peer in (receiver, sender):
        assert "was filled again" in peer.call(_is_gone, first, timeout=60)


def _close_while_it_is_being_filled() -> list[bool]:
    """Whether the next bucket is the one that was closed: while a stream has to fill it still, and afterwards."""
    with StreamGate(ipcsync.default_stream()) as gate:
        closed = _send(1)
        held = _send_in_the_next(2)
        gate.open()
        ipcsync.default_stream().synchronize(30)
    return [sent.handle == closed.handle for sent in (held, _send(3))]


def test_a_bucket_that_a_stream_has_to_fill_still_is_not_used_again(three: list[Peer]) -> None:
    assert three[0].call(_close_while_it_is_being_filled, timeout=120) == [False, True]


def _spare_sizes() -> list[int]:
    """The sizes of the buckets that are had, one after another, for tensors of other sizes."""
    sizes = []
    for size in (1000, 300, 9 << 20, 17 << 20, 12 << 20, 5 << 20):
        bucket = buckets.bucket_for(size, torch.device("cpu"))
        sizes.append(bucket.size)
        bucket.close()
    return sizes


def test_a_bucket_is_at_most_twice_as_large_as_asked_for_and_a_new_one_a_quarter_larger(three: list[Peer]) -> None:
    sizes = three[0].call(_spare_sizes, timeout=120)
    assert sizes == [4096, 4096, 10 << 20, 20 << 20, 20 << 20, 10 << 20]


def test_a_bucket_without_a_handle_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on MIG, whose drivers export nothing; no such device is here."""

    def refused(_: Memory) -> bytes:
        raise ipcsync.DriverError("not supported")

    def free_bytes() -> int:
        return int(unwrap(driver().cuMemGetInfo(), "cuMemGetInfo")[0])

    ipcsync.set_device(0)
    monkeypatch.setattr(Memory, "handle", refused)
    before = free_bytes()
    with pytest.raises(ipcsync.DriverError):
        buckets.bucket_for(1 << 20, torch.device("cpu"))
    assert free_bytes() == before


def _send_lazy_tensors() -> list[list[complex]]:
    tensors = [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag]
    layouts = [(tensor.shape, tensor.dtype) for tensor in tensors]
    sent = buckets.bucket_for(buckets.size_of(layouts), torch.device("cpu")).fill(tensors)
    point = sent.received_point()
    point.synchronize(30)
    return [tensor.tolist() for tensor in buckets.received(sent, layouts, point, torch.device("cpu"))]


def test_tensors_that_are_conjugated_or_negated_lazily_arrive_so(three: list[Peer]) -> None:
    assert three[0].call(_send_lazy_tensors, timeout=120) == [[1 - 2j], [-2]]


# --- the stream that copies -------------------------------------------------------------------------------------------


def _receive_on(stream: ipcsync.Stream, sent: buckets.Sent, timeout: float) -> list[torch.Tensor]:
    """Receive where `stream` is in the place of torch's current one, which there is on a GPU only."""
    point = sent.received_point()
    point.synchronize(30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ipcsync, "Stream", lambda _: stream)
        return buckets.received(sent, _LAYOUTS, point, torch.device("cpu"), timeout=timeout)


def _receive_behind_a_loss(sent: buckets.Sent, lost: bytes, pid: int) -> int:
    client, stream = ipcsync.default_client(), ipcsync.Stream()
    client.point(lost).wait(stream)
    os.kill(pid, signal.SIGKILL)
    until(lambda: client.point(lost).exception() is not None, "its recorder is dead")
    tensors = _receive_on(stream, sent, 30)
    with pytest.raises(ipcsync.RecorderLost):
        client.record(stream)
    return int(tensors[2].item())


def test_what_else_was_lost_on_the_stream_fails_no_receive_and_is_not_forgotten_by_it(three: list[Peer]) -> None:
    sender, receiver, dying = three
    sent, lost = sender.call(_send, 1, timeout=120), dying.call(_hold, "timeline", timeout=120)
    assert receiver.call(_receive_behind_a_loss, sent, lost, dying.pid, timeout=60) == 1


def _receive_on_a_held_stream(sent: buckets.Sent) -> float:
    """The copy is into pinned memory, in the place of a GPU's: one into a CPU tensor would block its caller."""
    stream, mine = ipcsync.Stream(), Memory(buckets.size_of(_LAYOUTS), pinned=True)
    flat = torch.frombuffer((ctypes.c_char * mine.size).from_address(mine.address), dtype=torch.uint8)
    with StreamGate(stream), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: flat)
        began = time.monotonic()
        with pytest.raises(ipcsync.WaitTimeout):
            _receive_on(stream, sent, 0.1)
        return time.monotonic() - began


def test_a_receive_ends_with_its_timeout(three: list[Peer]) -> None:
    sender, receiver, _ = three
    sent = sender.call(_send, 1, timeout=120)
    assert receiver.call(_receive_on_a_held_stream, sent, timeout=120) < buckets._END_S


def _receive_on_a_capturing_stream(sent: buckets.Sent) -> int:
    """How many nodes the graph has then."""
    stream = ipcsync.Stream()
    handle, mode = driver().CUstream(stream.cuda_stream), driver().CUstreamCaptureMode(1)
    unwrap(driver().cuStreamBeginCapture(handle, mode), "cuStreamBeginCapture")
    with pytest.raises(ipcsync.StreamCapturing):
        _receive_on(stream, sent, 30)
    graph = unwrap(driver().cuStreamEndCapture(handle), "cuStreamEndCapture")
    return int(unwrap(driver().cuGraphGetNodes(graph, 0), "cuGraphGetNodes")[1])


def test_a_bucket_of_another_device_than_the_tensors_is_refused() -> None:
    """There is no GPU: what says where it is stands for a tensor."""
    bucket = buckets.Bucket(1 << 12, 0)
    with pytest.raises(ValueError, match="the tensors are on cuda:1, and the bucket for them on cuda:0"):
        bucket.fill([SimpleNamespace(device=torch.device("cuda", 1))])


def test_a_capture_gets_no_copies(three: list[Peer]) -> None:
    sender, receiver, _ = three
    sent = sender.call(_send, 1, timeout=120)
    assert receiver.call(_receive_on_a_capturing_stream, sent, timeout=120) == 0
