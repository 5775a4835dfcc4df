"""What becomes of work, where no public source says it. As in `test_probes`, each test writes the answer down.

Records of other processes, work of the dead, streams that wait for a word of shared memory, streams beside others that
wait, and what handles cost. What is accepted is what ipcsync can live with.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from types import ModuleType
from typing import Any

import pytest

from ipcsync._drivers import handle_bytes, load
from ipcsync._linux.futex import OWNER_DIED
from ipcsync._linux.process import PidFd
from tests.contract import actions, probe_actions
from tests.contract.probes import say, write_down
from tests.contract.sharing import share
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import code, complete, finish, ok
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.driver, pytest.mark.process]

New = Callable[..., Any]
SETTLE_S = min(10.0, DEADLINE_S)  # a driver that completes the work of the dead does so well within this
BLINK_S = 0.5  # for what never comes
WAKE_S = 2.0  # for a store to end a wait: what takes so long does not wake it at all
OTHERS = 32
HANDLES = 32
DONE, HELD = 0, 1  # words of the page


@pytest.fixture
def word(drv: ModuleType, ctx: Any, page: kit.Page) -> Iterator[Any]:
    """The page's first word, as streams reach it."""
    yield drv.CUdeviceptr(page.register())
    kit.open_all_latches()
    page.words[DONE] = 2**62  # whoever waits for it goes on
    assert page.unregister() == kit.SUCCESS


def seconds_to_finish(stream: Any) -> float | None:
    """How long the stream takes to finish, asked without a pause; None if longer than `WAKE_S`."""
    began = time.perf_counter()
    while not kit.is_ready(load().cuStreamQuery(stream)):
        if time.perf_counter() - began > WAKE_S:
            return None
    return time.perf_counter() - began


# --- records of others ------------------------------------------------------------------------------------------------


def test_a_pending_record_shows_in_the_other_process(
    drv: ModuleType, stream: Any, ipc_event: Any, partner: Peer
) -> None:
    share(drv, ipc_event, partner)
    latch = kit.Latch(stream)
    ok(drv.cuEventRecord(ipc_event, stream))
    in_importer = partner.call(actions.query, "e")
    partner.begin(actions.synchronize, "e")
    blocks = not partner.connection.poll(BLINK_S)
    latch.open()
    assert partner.result() == kit.SUCCESS
    partner.call(actions.hold, "s")
    assert partner.call(actions.record, "e", "s") == kit.SUCCESS
    in_exporter = code(drv.cuEventQuery(ipc_event))
    partner.call(actions.release, "s")
    complete(ipc_event)
    synchronizes = "blocks" if blocks else "returns at once"
    write_down(
        "the exporter's record is pending", f"the importer's query: {say(in_importer)}; synchronize {synchronizes}"
    )
    write_down("the importer's record is pending", f"the exporter's query: {say(in_exporter)}")
    assert (in_importer, blocks, in_exporter) == (kit.NOT_READY, True, kit.NOT_READY)


# --- work of the dead -------------------------------------------------------------------------------------------------


def share_by(exporter: Peer, partner: Peer) -> None:
    """As `share`, of another process's event: what is left pending ends with it, and is in no later event's place."""
    assert partner.call(actions.open_event, "e", exporter.call(actions.share_event, "e")) == kit.SUCCESS
    partner.call(actions.create_stream, "s")


def test_a_record_left_pending_by_a_dead_process_stays_so_or_completes(partner: Peer, third: Peer, kind: str) -> None:
    share_by(third, partner)
    partner.call(actions.hold, "s")
    assert partner.call(actions.record, "e", "s") == kit.SUCCESS
    partner.kill()
    never = kind == "software" and os.environ.get("IPCSYNC_HOST_DEATH") != "complete"
    patience = BLINK_S if never else SETTLE_S
    with suppress(AssertionError):
        until(lambda: third.call(actions.query, "e") != kit.NOT_READY, "an answer", patience)
    answer = third.call(actions.query, "e")
    pending = answer == kit.NOT_READY
    write_down(
        "a process dies with a record pending",
        f"still pending {patience:g} s later" if pending else f"query says {say(answer)}",
    )
    if never:
        assert pending
    elif kind == "software":
        assert answer == kit.SUCCESS


def test_a_word_that_a_dead_process_was_about_to_write_is_written_or_a_store_ends_the_wait(
    drv: ModuleType, stream: Any, page_path: str, page: kit.Page, word: Any, partner: Peer, kind: str
) -> None:
    partner.call(actions.create_stream, "s")
    partner.call(actions.register_page, "page", page_path)
    partner.call(actions.hold, "s")
    assert partner.call(actions.write_word, "s", "page", DONE, 1) == kit.SUCCESS
    ok(drv.cuStreamWaitValue64(stream, word, 1, kit.GEQ))
    partner.kill()
    patience = SETTLE_S if kind == "gpu" else BLINK_S
    with suppress(AssertionError):
        until(lambda: page.words[DONE], "the dead process's write", patience)
    written = page.words[DONE]
    page.words[DONE] = 2  # what the coordinator does for a lost recorder
    store = "ends the wait" if seconds_to_finish(stream) is not None else "does not end the wait"
    said = f"the word is {written} then" if written else f"the word is not written within {patience:g} s"
    write_down("a process dies with a write of a word pending", f"{said}; a CPU's store {store}")
    assert written in (0, 1)
    assert store == "ends the wait"


def test_what_a_killed_process_had_submitted_ends_before_or_after_its_death_is_seen(
    page_path: str, page: kit.Page, word: Any, partner: Peer, third: Peer, kind: str
) -> None:
    share_by(third, partner)
    partner.call(actions.register_page, "page", page_path)
    partner.call(probe_actions.hold_robustly, "page", HELD)
    size, times = (2 << 30, 400) if kind == "gpu" else (64 << 20, 30)  # about 0.3 s each
    partner.call(probe_actions.submit_long_work, "s", size, times)
    assert partner.call(actions.write_word, "s", "page", DONE, 1) == kit.SUCCESS
    assert partner.call(actions.record, "e", "s") == kit.SUCCESS
    signs: dict[str, Callable[[], Any]] = {
        "the robust futex is marked": lambda: page.words[HELD] & OWNER_DIED,
        "the pidfd is readable": lambda: pidfd.has_ended(0),
        "the last word is written": lambda: page.words[DONE],
        "the event is not pending": lambda: third.call(actions.query, "e") != kit.NOT_READY,
    }
    deaths = list(signs)[:2]
    seen: dict[str, float] = {}
    with closing(PidFd(partner.pid)) as pidfd:
        was_done = bool(page.words[DONE])
        os.kill(partner.pid, signal.SIGKILL)
        began = last = time.perf_counter()
        while len(seen) < len(signs) and time.perf_counter() - last < (3.0 if kind == "gpu" else BLINK_S):
            for sign in signs.keys() - seen.keys():
                if signs[sign]():
                    seen[sign] = time.perf_counter() - began
            if not all(death in seen for death in deaths):
                last = time.perf_counter()
                assert last - began < DEADLINE_S
    partner.kill()
    when = [f"{sign} after {seen[sign] * 1e3:.1f} ms" if sign in seen else f"{sign}: never" for sign in signs]
    write_down("a process is killed amid long work", "the work was done before" if was_done else "; ".join(when))


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_store_of_the_cpu_ends_a_streams_wait_for_a_word(
    drv: ModuleType, stream: Any, new_stream: New, page: kit.Page, word: Any
) -> None:
    took: list[float | None] = []
    for number in range(1, 51):
        ok(drv.cuStreamWaitValue64(stream, word, number, kit.GEQ))
        assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
        page.words[DONE] = number
        took.append(seconds_to_finish(stream))
        if took[-1] is None:
            break
    times = [seconds * 1e6 for seconds in took if seconds is not None]
    answer = f"the wait {len(took)} is not over {WAKE_S:g} s later; another stream's write ends it"
    if len(times) < len(took):
        ok(drv.cuStreamWriteValue64(new_stream(), word, len(took), 0))
        finish(stream)
    else:
        answer = f"after {statistics.median(times):.1f} µs (median of {len(times)}; the longest {max(times):.1f})"
    write_down("a CPU's store to tmpfs ends a stream's wait, by its query", answer)
    assert len(times) == len(took)


@pytest.mark.parametrize("connections", [1, 8, 32])
def test_streams_beside_one_that_waits_go_on_or_share_its_hardware_queue(new_peer: New, connections: int) -> None:
    partner = new_peer(CUDA_DEVICE_MAX_CONNECTIONS=str(connections))
    partner.call(actions.start)
    went_on = partner.call(probe_actions.go_on_beside_a_wait, OTHERS)
    assert all(0 <= count <= OTHERS for count in went_on.values())
    answer = "; ".join(f"{count} of {OTHERS} beside {what}" for what, count in went_on.items())
    write_down(f"other streams that go on, {connections} hardware queues", answer)


# --- what handles cost ------------------------------------------------------------------------------------------------


def test_handles_of_many_events_are_made_and_opened_in_some_time(drv: ModuleType, ctx: Any, partner: Peer) -> None:
    made, exported, handles = [], [], []
    for _ in range(HANDLES):
        began = time.perf_counter()
        event = ok(drv.cuEventCreate(kit.SHAREABLE))
        made.append(time.perf_counter() - began)
        began = time.perf_counter()
        handles.append(handle_bytes(ok(drv.cuIpcGetEventHandle(event))))
        exported.append(time.perf_counter() - began)
    opened, closed = partner.call(probe_actions.time_opening, handles)
    steps = {"create": made, "export": exported, "open": opened, "destroy the import": closed}
    answer = ", ".join(f"{step} {statistics.median(times) * 1e6:.1f} µs" for step, times in steps.items())
    write_down(f"an interprocess event (median of {HANDLES})", answer)
    assert len(opened) == len(closed) == HANDLES
