"""What is tried first by those who come from torch, or who have read no page of the documentation yet."""

from __future__ import annotations

import copy
import enum
import inspect
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
import zmq

import ipcsync
from ipcsync._board import layout
from ipcsync._wire import messages
from ipcsync.testing import StreamGate
from ipcsync.typing import CoordinatorSettings
from ipcsync_keeper.config import Settings

# --- streams that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2, 3, 30, 4095, 0.5])
def test_a_timeout_given_for_a_stream_is_refused_with_a_hint(client: ipcsync.Client, number: float) -> None:
    point = client.record()
    with pytest.raises(TypeError, match=re.escape(f"did you mean timeout={number!r}?")):
        point.wait(number)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [3, 30, 4095])
def test_what_can_be_no_streams_address_is_refused_everywhere(client: ipcsync.Client, number: int) -> None:
    with client.event("e", recorder=True) as event:
        uses: list[Callable[[], object]] = [
            lambda: event.record(number),
            lambda: client.record(number),
            lambda: ipcsync.Event().record(number),
            lambda: StreamGate(number),
            lambda: ipcsync.set_stream(number),
        ]
        for use in uses:
            with pytest.raises(TypeError, match="is not a stream"):
                use()


@pytest.mark.parametrize("number", [0, 1, 30, 4095])
def test_what_can_be_no_events_address_is_refused(number: int) -> None:
    with pytest.raises(TypeError, match="is not an event"):
        ipcsync.Stream().wait_event(number)


def test_the_default_streams_handles_are_streams(client: ipcsync.Client) -> None:
    for handle in (0, 1):
        client.record(handle).synchronize(10)


# --- torch's habits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("habit", ["wait", "query", "synchronize", "elapsed_time", "ipc_handle"])
def test_what_an_event_of_torchs_has_leads_to_what_a_shared_one_has(client: ipcsync.Client, habit: str) -> None:
    with client.event("e", recorder=True) as event:
        with pytest.raises(AttributeError, match=f"a SharedEvent has no '{habit}': ") as refused:
            getattr(event, habit)
        assert any(word in str(refused.value) for word in ("point.", "ipcsync.Event", "event.handles"))
        with pytest.raises(AttributeError, match=r"has no attribute 'colour'$"):
            event.colour  # type: ignore[attr-defined] # noqa: B018
        assert not hasattr(event, "wait")


def test_an_event_that_is_not_for_other_processes_says_so_when_it_is_exported() -> None:
    with pytest.raises(ipcsync.DriverError, match=re.escape("make it as ipcsync.Event(interprocess=True)")) as refused:
        ipcsync.Event().ipc_handle()
    assert refused.value.code == 400


# --- names and copies -------------------------------------------------------------------------------------------------


class Text(str):
    """A str of a user's."""

    __slots__ = ()


class Name(str, enum.Enum):
    KV = "kv/ready"


@pytest.mark.parametrize("name", [Text("kv/ready"), Name.KV], ids=["subclass", "enum"])
def test_a_name_may_be_any_kind_of_str(coordinator: ipcsync.Coordinator, name: str) -> None:
    with ipcsync.connect(Text(coordinator.endpoint), name=name) as client, client.event(name, recorder=True) as event:
        assert (event.name, type(event.name), client.name) == ("kv/ready", str, "kv/ready")
        event.record().synchronize(10)
        assert [row.name for row in client.list_events(name)] == ["kv/ready"]
        assert client.list_attachments(name)
        client.stream(name).synchronize()
        assert next(client.watch(name)).name == "kv/ready"
    with pytest.raises(TypeError, match="a name is a str, but got int"):
        ipcsync.connect(coordinator.endpoint, name=5)  # type: ignore[arg-type]


def test_what_is_one_processs_own_does_not_travel_and_is_not_copied(client: ipcsync.Client) -> None:
    with client.event("e") as event:
        for thing, hint in ((event, r"bytes\(point\)"), (client, "connect again")):
            with pytest.raises(TypeError, match=hint):
                pickle.dumps(thing)
            for copied in (copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match=hint):
                    copied(thing)


# --- starting ---------------------------------------------------------------------------------------------------------


def test_a_setting_that_there_is_not_is_a_type_error_with_a_hint() -> None:
    with pytest.raises(TypeError, match=r"launch\(\) has no setting 'lease'; did you mean lease_ttl\?"):
        ipcsync.launch(lease=5)  # type: ignore[call-arg] # as type checkers say too
    with pytest.raises(TypeError, match="those of `ipcsync coordinator` are devices, pool"):
        ipcsync.launch(colour="red")  # type: ignore[call-arg] # the same


def test_launch_knows_every_setting_of_the_coordinator_and_its_type() -> None:
    of_the_coordinator = get_type_hints(Settings)
    own = {name: of_the_coordinator.pop(name) for name in ("runtime_dir", "driver", "keeper")}
    assert own.keys() <= inspect.signature(ipcsync.launch).parameters.keys()
    assert get_type_hints(CoordinatorSettings) == of_the_coordinator


@pytest.mark.parametrize("value", [b"5", [5], (1, 2)])
def test_a_setting_of_no_flags_type_is_a_type_error_that_names_it(value: Any) -> None:
    with pytest.raises(TypeError, match="the setting lease_ttl must be text, a number or a bool, but got"):
        ipcsync.launch(lease_ttl=value)


def _answer_as_another_version(socket: zmq.Socket[bytes]) -> None:
    routing, frame = socket.recv_multipart()
    (_, request_id, *_) = msgspec.msgpack.decode(frame)
    refusal = {"kind": "ProtocolError", "message": "protocol version 2, but this is 99", "attributes": {}}
    socket.send_multipart([routing, msgspec.msgpack.encode([99, request_id, "failure", refusal])])


def test_a_coordinator_of_another_protocol_version_is_named_with_both(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/coordinator.sock"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(endpoint)
        thread = threading.Thread(target=_answer_as_another_version, args=(socket,))
        thread.start()
        text = rf"of another version of ipcsync: .*version 99, and this is version {messages.VERSION}; install"
        with pytest.raises(ipcsync.ConnectError, match=text) as refused:
            ipcsync.connect(endpoint, timeout=10)
        thread.join()
    assert refused.value.endpoint == endpoint


@pytest.mark.own_coordinator
def test_a_board_of_another_version_is_named_with_both(coordinator: ipcsync.Coordinator) -> None:
    with ipcsync.connect(coordinator.endpoint) as first:
        board = Path(first._session.lease.board.path)
    with board.open("r+b") as file:
        file.seek(8 * layout.H_VERSION)
        file.write((99).to_bytes(8, sys.byteorder))
    text = f"is of version 99, and this is version {layout.VERSION}; install"
    with pytest.raises(ipcsync.ConnectError, match=text) as refused:
        ipcsync.connect(coordinator.endpoint, timeout=10)
    assert refused.value.endpoint == coordinator.endpoint


_TWO_PROCESSES = """
import subprocess, sys
import ipcsync
with ipcsync.launch(log_level="warning") as coordinator, ipcsync.connect(coordinator.endpoint) as client:
    client.record().synchronize(10)
    child = "import ipcsync; ipcsync.connect().close()"
    subprocess.run([sys.executable, "-c", child], check=True, env={**__import__("os").environ,
                   "IPCSYNC_ENDPOINT": coordinator.endpoint})
"""


@pytest.mark.process
@pytest.mark.skipif(os.environ["IPCSYNC_DRIVER"] != "host", reason="here is a CUDA driver, of which nobody warns")
def test_that_there_is_no_driver_is_said_once_for_all_processes_of_a_program() -> None:
    env = {**os.environ, "IPCSYNC_DRIVER": "auto"}
    done = subprocess.run(
        [sys.executable, "-c", _TWO_PROCESSES], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.count("no CUDA driver here") == 1


# --- unnamed events ---------------------------------------------------------------------------------------------------


def test_an_event_that_another_stream_takes_over_keeps_its_points_good(
    client: ipcsync.Client, new_client: Callable[..., ipcsync.Client]
) -> None:
    first = ipcsync.Stream()
    point = client.record(first)
    point.synchronize(10)
    data = bytes(point)
    streams = [ipcsync.Stream() for _ in range(40)]
    for stream in streams:
        client.record(stream).synchronize(10)
    assert client.stats()["pool_in_use"] == 32
    assert point.query()
    late = new_client("late").point(data)  # who sees it for the first time
    assert late.query()
    late.wait(ipcsync.Stream())
    assert client.record(first) != point


def test_streams_with_work_in_flight_keep_their_events(client: ipcsync.Client) -> None:
    held = [ipcsync.Stream() for _ in range(40)]
    gates = [StreamGate(stream) for stream in held]
    points = [client.record(stream) for stream in held]
    assert client.stats()["pool_in_use"] == 40
    assert len({(point._key.slot, point._key.incarnation) for point in points}) == 40
    assert not any(point.query() for point in points)
    for gate in gates:
        gate.open()
    for point in points:
        point.synchronize(10)


def test_a_pool_that_is_used_up_by_idle_unnamed_events_has_room(
    new_coordinator: Callable[..., ipcsync.Coordinator],
) -> None:
    coordinator = new_coordinator(pool=4)
    with ipcsync.connect(coordinator.endpoint) as client:
        for _ in range(10):
            client.record(ipcsync.Stream()).synchronize(10)
        streams = [ipcsync.Stream() for _ in range(5)]
        gates = [StreamGate(stream) for stream in streams]
        for stream in streams[:4]:
            client.record(stream)
        with pytest.raises(ipcsync.QuotaExceeded):
            client.record(streams[4])
        for gate in gates:
            gate.open()


def test_a_record_without_a_name_has_depth_and_timeout(client: ipcsync.Client) -> None:
    stream, other = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(stream), StreamGate(other):
        for _ in range(3):
            client.record(stream, engine="event", depth=3)
        with pytest.raises(ipcsync.WaitTimeout, match="all depth=3 are in flight") as full:
            client.record(stream, engine="event", timeout=0.01)
        assert (full.value.generation, full.value.timeout) == (1, 0.01)
        for _ in range(ipcsync.DEFAULT_DEPTH):
            client.record(other, engine="event", timeout=0)
        with pytest.raises(ipcsync.WaitTimeout):
            client.record(other, engine="event", timeout=0)
    with pytest.raises(ValueError, match="depth"):
        client.record(ipcsync.Stream(), depth=0)


# --- the end ----------------------------------------------------------------------------------------------------------

_DAEMONS = """
import sys, threading
import ipcsync
client = ipcsync.connect(sys.argv[1])
event = client.event("never")
ready = threading.Barrier(4)

def wait(call):
    ready.wait()
    call()

waits = [event.at(1).synchronize, event.at(1).wait, lambda: list(client.watch())]
for call in waits:
    threading.Thread(target=wait, args=(call,), daemon=True).start()
ready.wait()
"""


@pytest.mark.program
@pytest.mark.process
def test_daemon_threads_that_wait_when_the_program_ends_print_nothing(coordinator: ipcsync.Coordinator) -> None:
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", _DAEMONS, coordinator.endpoint],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
