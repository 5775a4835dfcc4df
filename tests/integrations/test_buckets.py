"""Tensors that pass from process to process in buckets: `make test-vllm`. They are of the CPU; the bucket is not."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import ipcsync
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
    bucket = buckets.Bucket(buckets.size_of(_LAYOUTS), tensors[0].device)
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


def _hold() -> bytes:
    """A point that is pending until this process is killed."""
    stream = ipcsync.Stream()
    _kept.append(StreamGate(stream))
    return bytes(ipcsync.default_client().record(stream, engine="event"))


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
