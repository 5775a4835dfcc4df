"""The checker finds each kind of broken promise in a history, and none where there is none."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.soak.history import DEEDS, SIZE, History, Op, Record, Result, path_of, read, truth_word
from tests.soak.history_checker import check
from tests.soak.history_facts import Report
from tests.soak.oracle import combined, new_tag, stream_of

TTL_S = 3.0
RECORDER, WAITER, OTHER = 0, 1, 2  # lives
TAG, LATER_TAG = 0x8000000001, 0x8000000002
_S = 1_000_000_000


def point(
    op: Op, result: Result, start: float, end: float, generation: int = 1, done: int = 0, **fields: int
) -> Record:
    """A record of a call on the event's point, its times in seconds; `done` is how far the work really is."""
    whole: dict[str, int] = {"tag": TAG, "held": 1, "slot": 5, "incarnation": 2, "name": 7, **fields}
    return Record(
        op,
        result,
        generation=generation,
        start=int(start * _S),
        end=int(end * _S),
        truth=truth_word(TAG, done),
        **whole,
    )


def opened(start: float = 1.0, **fields: int) -> Record:
    """A recorder's open."""
    return point(Op.OPEN_RECORDER, Result.OK, start, start + 0.1, 0, **fields)


def recorded(generation: int, start: float, **fields: int) -> Record:
    """A record that was made."""
    return point(Op.RECORD, Result.OK, start, start + 0.1, generation, **fields)


class Soak:
    """Histories written by hand."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lives: dict[int, list[Record]] = {RECORDER: [opened(), recorded(1, 2.0)], WAITER: [], OTHER: []}
        self._deeds: list[Record] = []

    def life(self, life: int, *records: Record) -> Soak:
        """Add to what a life did."""
        self._lives.setdefault(life, []).extend(records)
        return self

    def deed(self, op: Op, life: int, at: float, status: int = 0) -> Soak:
        """Add a kill, stop, continue or exit."""
        at_ns = int(at * _S)
        self._deeds.append(Record(op, Result.OK, slot=life, generation=status, start=at_ns, end=at_ns))
        return self

    def check(self) -> Report:
        """What the checker says of it."""
        for life, records in self._lives.items():
            _write(path_of(self._directory, life), records)
        _write(self._directory / DEEDS, self._deeds)
        return check(self._directory, ttl_s=TTL_S)

    def rules(self) -> list[str]:
        """The rules found broken."""
        return [violation.rule for violation in self.check().violations]


def _write(path: Path, records: list[Record]) -> None:
    history = History(path)
    for record in records:
        history.write(record)
    history.close()


@pytest.fixture
def soak(tmp_path: Path) -> Soak:
    """A recorder that opened an event and recorded once."""
    return Soak(tmp_path)


# --- the form ---------------------------------------------------------------------------------------------------------


def test_a_history_gives_back_what_was_written_but_for_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "h"
    records = [recorded(n, float(n)) for n in range(1, 4)]
    _write(path, records)
    assert path.stat().st_size == 3 * SIZE
    with open(path, "r+b") as file:
        file.truncate(3 * SIZE - 1)
    assert list(read(path)) == records[:2]


def test_records_never_lie_across_two_pages() -> None:
    assert 4096 % SIZE == 0


def test_a_use_has_come_as_far_as_all_its_streams_have() -> None:
    tag = new_tag(random.Random(1), one_stream=False)
    streams = [stream_of(tag, generation) for generation in range(1, 20)]
    assert set(streams) == {0, 1}
    for behind in (0, 1):  # one stream has done all of its own, the other none
        words = [truth_word(tag, 19), 0] if behind else [0, truth_word(tag, 19)]
        assert combined(*words) == truth_word(tag, streams.index(behind))
    assert combined(truth_word(tag, 19), truth_word(tag, 18)) >= truth_word(tag, 18)
    assert combined(0, 0) == 0


# --- what is clean ----------------------------------------------------------------------------------------------------


def test_a_soak_in_which_all_is_well_has_no_violation(soak: Soak) -> None:
    soak.life(RECORDER, recorded(2, 3.0), point(Op.CLOSE_RECORDER, Result.OK, 9.0, 9.1, 0))
    soak.life(
        WAITER,
        point(Op.ATTACH, Result.OK, 2.2, 2.3),
        point(Op.QUERY, Result.NOT_YET, 2.3, 2.31),
        point(Op.SYNCHRONIZE, Result.BEGUN, 2.4, 2.4, timeout_ms=20_000),
        point(Op.SYNCHRONIZE, Result.OK, 2.4, 2.5, done=1, timeout_ms=20_000),
        point(Op.WAIT, Result.OK, 2.6, 2.7),
        point(Op.STREAM, Result.OK, 2.6, 2.8, done=1),
        point(Op.SYNCHRONIZE, Result.RECORDER_LOST, 9.5, 9.6, 3, held=2),
        point(Op.QUERY, Result.OK, 9.7, 9.8, 2, done=2, held=3),
    )
    report = soak.check()
    assert report.violations == []
    assert report.count(Op.SYNCHRONIZE) == 2
    assert report.count(Op.SYNCHRONIZE, result=Result.OK) == 1


def test_what_a_killed_recorder_left_may_be_lost_and_what_was_seen_before_stays_good(soak: Soak) -> None:
    soak.deed(Op.KILL, RECORDER, 3.0).deed(Op.EXIT, RECORDER, 3.1, 256 + 9)
    soak.life(WAITER, point(Op.QUERY, Result.OK, 2.5, 2.6, done=1), point(Op.QUERY, Result.OK, 4.0, 4.1, done=1))
    soak.life(
        OTHER,
        point(Op.QUERY, Result.RECORDER_LOST, 3.5, 3.6, held=2),
        point(Op.STREAM, Result.RECORDER_LOST, 2.5, 3.7, done=0, held=2),
    )
    assert soak.rules() == []


def test_a_session_stopped_for_a_ttl_may_expire(soak: Soak) -> None:
    soak.deed(Op.STOP, WAITER, 3.0).deed(Op.CONTINUE, WAITER, 8.0)
    soak.life(WAITER, point(Op.QUERY, Result.SESSION_EXPIRED, 8.1, 8.2))
    assert soak.rules() == []


def test_a_call_cut_off_by_a_kill_is_no_hang(soak: Soak) -> None:
    soak.life(WAITER, point(Op.SYNCHRONIZE, Result.BEGUN, 3.0, 3.0, timeout_ms=20_000))
    soak.deed(Op.KILL, WAITER, 20.0).deed(Op.EXIT, WAITER, 20.1, 256 + 9)
    assert soak.rules() == []


def test_a_timeout_of_what_nobody_recorded_is_no_lost_wake_up(soak: Soak) -> None:
    soak.life(WAITER, point(Op.SYNCHRONIZE, Result.TIMEOUT, 3.0, 23.0, 2, timeout_ms=20_000))
    assert soak.rules() == []


# --- what is not ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [Op.QUERY, Op.SYNCHRONIZE, Op.STREAM])
def test_a_wait_that_returned_before_the_work_was_done_is_found(soak: Soak, op: Op) -> None:
    soak.life(RECORDER, recorded(2, 2.5)).life(WAITER, point(op, Result.OK, 3.0, 3.1, 2, done=1))
    assert soak.rules() == ["silent pass"]


def test_a_wait_answered_by_another_uses_work_is_found(soak: Soak) -> None:
    record = point(Op.QUERY, Result.OK, 3.0, 3.1)._replace(truth=truth_word(LATER_TAG, 1))
    assert soak.life(WAITER, record).rules() == ["silent pass"]


def test_a_success_that_nobody_recorded_for_is_found(soak: Soak) -> None:
    assert soak.life(WAITER, point(Op.QUERY, Result.OK, 3.0, 3.1, tag=0, slot=6)).rules() == ["silent pass"]


def test_a_stream_that_went_on_though_nothing_was_lost_is_found(soak: Soak) -> None:
    soak.life(WAITER, point(Op.STREAM, Result.CLIENT_CLOSED, 3.0, 3.1, done=0))
    assert soak.rules() == ["silent pass"]


def test_a_stream_that_went_on_while_its_point_is_still_to_come_is_found(soak: Soak) -> None:
    assert "silent pass" in soak.life(WAITER, point(Op.STREAM, Result.NOT_YET, 3.0, 3.1, done=0)).rules()


@pytest.mark.parametrize("result", [Result.NOT_YET, Result.RECORDER_LOST])
def test_a_success_that_is_taken_back_is_found(soak: Soak, result: Result) -> None:
    soak.deed(Op.KILL, RECORDER, 3.5)
    soak.life(WAITER, point(Op.QUERY, Result.OK, 3.0, 3.1, done=1), point(Op.QUERY, result, 4.0, 4.1, done=1))
    assert soak.rules() == ["taken back"]


def test_a_loss_while_the_recorder_lives_is_found(soak: Soak) -> None:
    assert soak.life(WAITER, point(Op.SYNCHRONIZE, Result.RECORDER_LOST, 3.0, 3.1)).rules() == ["false loss"]


def _two_sessions(soak: Soak, end: Op, result: Result) -> None:
    """The recorder's session ends at 3 s, and it opens another event in a new one at 4 s."""
    soak.life(RECORDER, point(end, Result.BEGUN, 3.0, 3.0, 0), point(end, result, 3.0, 3.1, 0))
    soak.life(RECORDER, point(Op.CONNECT, Result.OK, 3.2, 3.3, 0))
    soak.life(RECORDER, opened(4.0, tag=LATER_TAG, slot=9), recorded(1, 5.0, tag=LATER_TAG, slot=9))


@pytest.mark.parametrize("end", [Op.DISCONNECT, Op.RECORD])
def test_what_a_session_recorded_before_it_ended_may_be_lost(soak: Soak, end: Op) -> None:
    _two_sessions(soak, end, Result.OK if end == Op.DISCONNECT else Result.SESSION_EXPIRED)
    report = soak.life(WAITER, point(Op.QUERY, Result.RECORDER_LOST, 6.0, 6.1)).check()
    assert "false loss" not in [violation.rule for violation in report.violations]


def test_a_loss_in_a_second_session_of_a_process_is_not_excused_by_the_end_of_the_first(soak: Soak) -> None:
    _two_sessions(soak, Op.DISCONNECT, Result.OK)
    soak.life(WAITER, point(Op.QUERY, Result.RECORDER_LOST, 6.0, 6.1, tag=LATER_TAG, slot=9))
    assert soak.rules() == ["false loss"]


def test_a_loss_before_its_session_says_goodbye_is_found(soak: Soak) -> None:
    _two_sessions(soak, Op.DISCONNECT, Result.OK)
    assert soak.life(WAITER, point(Op.QUERY, Result.RECORDER_LOST, 2.5, 2.6)).rules() == ["false loss"]


def test_a_loss_of_what_a_recorder_recorded_before_it_closed_is_found(soak: Soak) -> None:
    soak.life(RECORDER, point(Op.CLOSE_RECORDER, Result.OK, 3.0, 3.1, 0))
    assert soak.life(WAITER, point(Op.QUERY, Result.RECORDER_LOST, 4.0, 4.1)).rules() == ["false loss"]


def test_a_loss_that_is_undone_in_another_process_is_found(soak: Soak) -> None:
    soak.deed(Op.KILL, RECORDER, 3.0)
    soak.life(WAITER, point(Op.QUERY, Result.RECORDER_LOST, 3.5, 3.6))
    soak.life(OTHER, point(Op.QUERY, Result.OK, 4.0, 4.1, done=1))
    assert soak.rules() == ["loss undone"]


@pytest.mark.parametrize(("done", "rules"), [(1, []), (0, ["loss undone"])], ids=["complete by then", "pending"])
def test_what_a_wait_found_complete_is_known_later(soak: Soak, done: int, rules: list[str]) -> None:
    soak.deed(Op.KILL, RECORDER, 3.0)
    soak.life(OTHER, point(Op.WAIT, Result.OK, 2.5, 2.6, done=done), point(Op.QUERY, Result.OK, 4.0, 4.1, done=1))
    soak.life(WAITER, point(Op.QUERY, Result.RECORDER_LOST, 3.5, 3.6))
    assert soak.rules() == rules


def test_a_loss_of_one_generation_is_a_loss_of_all_later_ones(soak: Soak) -> None:
    soak.life(RECORDER, recorded(2, 2.5)).deed(Op.KILL, RECORDER, 3.0)
    soak.life(WAITER, point(Op.QUERY, Result.RECORDER_LOST, 3.5, 3.6))
    soak.life(OTHER, point(Op.QUERY, Result.OK, 4.0, 4.1, 2, done=2))
    assert soak.rules() == ["loss undone"]


def test_a_timeout_of_what_was_known_complete_long_before_is_found(soak: Soak) -> None:
    soak.life(OTHER, point(Op.QUERY, Result.OK, 3.0, 3.1, done=1))
    soak.life(WAITER, point(Op.SYNCHRONIZE, Result.TIMEOUT, 2.5, 22.5, timeout_ms=20_000))
    assert soak.rules() == ["lost wake-up"]


def test_a_timeout_of_what_was_recorded_and_really_done_is_found(soak: Soak) -> None:
    soak.life(OTHER, point(Op.QUERY, Result.NOT_YET, 3.0, 3.1, done=1))
    soak.life(WAITER, point(Op.SYNCHRONIZE, Result.TIMEOUT, 2.5, 22.5, timeout_ms=20_000))
    assert soak.rules() == ["lost wake-up"]


def test_a_timeout_behind_a_dead_recorder_is_found(soak: Soak) -> None:
    soak.deed(Op.KILL, RECORDER, 3.0)
    soak.life(WAITER, point(Op.SYNCHRONIZE, Result.TIMEOUT, 2.5, 22.5, timeout_ms=20_000))
    assert soak.rules() == ["lost wake-up"]


def test_a_streams_wait_that_blocked_the_host_past_the_record_is_found(soak: Soak) -> None:
    soak.life(WAITER, point(Op.WAIT, Result.TIMEOUT, 1.5, 21.5, timeout_ms=20_000))
    assert soak.rules() == ["lost wake-up"]


def test_a_timeout_of_a_stopped_waiter_is_no_lost_wake_up(soak: Soak) -> None:
    soak.life(OTHER, point(Op.QUERY, Result.OK, 3.0, 3.1, done=1))
    soak.deed(Op.STOP, WAITER, 2.6).deed(Op.CONTINUE, WAITER, 23.0)
    soak.life(WAITER, point(Op.SYNCHRONIZE, Result.TIMEOUT, 2.5, 23.5, timeout_ms=20_000))
    assert soak.rules() == []


def test_a_request_that_was_never_answered_is_found(soak: Soak) -> None:
    soak.deed(Op.EXIT, OTHER, 60.0)  # in order, at the soak's end
    assert soak.life(WAITER, point(Op.ATTACH, Result.TIMEOUT, 3.0, 18.0)).rules() == ["lost wake-up"]


def test_a_request_that_an_overloaded_machine_did_not_answer_in_time_is_no_lost_wake_up(soak: Soak) -> None:
    soak.life(OTHER, Record(Op.LATE, Result.OK, start=10 * _S, end=12 * _S))
    assert soak.life(WAITER, point(Op.ATTACH, Result.TIMEOUT, 3.0, 18.0)).rules() == []


@pytest.mark.parametrize(("gone", "rules"), [(12.0, []), (10.9, ["lost wake-up"])])
def test_a_request_is_not_lost_that_no_answer_came_to_while_a_killed_process_could_not_end(
    soak: Soak, gone: float, rules: list[str]
) -> None:
    soak.deed(Op.KILL, OTHER, 10.0).deed(Op.EXIT, OTHER, gone)
    assert soak.life(WAITER, point(Op.ATTACH, Result.TIMEOUT, 3.0, 18.0)).rules() == rules


def test_a_stream_that_never_gets_past_a_wait_is_found(soak: Soak) -> None:
    assert soak.life(WAITER, point(Op.STUCK, Result.OK, 3.0, 20.0, done=1)).rules() == ["lost wake-up"]


def test_a_call_that_never_returned_is_found(soak: Soak) -> None:
    soak.life(WAITER, point(Op.QUERY, Result.BEGUN, 3.0, 3.0)).deed(Op.KILL, WAITER, 60.0)
    assert soak.rules() == ["hang"]


def test_work_on_a_slot_that_is_used_anew_is_found(soak: Soak) -> None:
    soak.life(OTHER, opened(5.0, tag=LATER_TAG, incarnation=3, name=8))
    soak.life(WAITER, point(Op.QUERY, Result.OK, 6.0, 6.1, done=1))
    assert soak.rules() == ["reused slot"]


def test_work_on_an_event_that_another_was_told_is_gone_is_found(soak: Soak) -> None:
    soak.life(OTHER, point(Op.ATTACH, Result.EVENT_CLOSED, 5.0, 5.1))
    soak.life(WAITER, point(Op.QUERY, Result.OK, 6.0, 6.1, done=1))
    assert soak.rules() == ["reused slot"]


def test_what_became_of_a_use_may_be_told_to_who_comes_late(soak: Soak) -> None:
    soak.life(OTHER, opened(5.0, tag=LATER_TAG, incarnation=3, name=8))
    late = point(Op.ATTACH, Result.OK, 6.0, 6.1)._replace(engine=2)
    soak.life(WAITER, late, point(Op.QUERY, Result.OK, 6.2, 6.3, done=1))
    assert soak.rules() == []


def test_one_use_given_to_two_recorders_is_found(soak: Soak) -> None:
    assert "two recorders" in soak.life(OTHER, opened(5.0, tag=LATER_TAG)).rules()


def test_a_record_on_a_name_that_another_records_on_since_is_found(soak: Soak) -> None:
    soak.life(OTHER, opened(5.0, tag=LATER_TAG, slot=9)).life(RECORDER, recorded(2, 6.0))
    assert soak.rules() == ["two recorders"]


def test_a_generation_left_out_is_found(soak: Soak) -> None:
    assert soak.life(RECORDER, recorded(3, 3.0)).rules() == ["generations"]


def test_an_error_that_the_call_may_not_raise_is_found(soak: Soak) -> None:
    assert soak.life(WAITER, point(Op.QUERY, Result.OTHER, 3.0, 3.1)).rules() == ["error"]


def test_a_coordinator_lost_while_it_ran_is_found(soak: Soak) -> None:
    assert soak.life(WAITER, point(Op.OPEN_WAITER, Result.COORDINATOR_LOST, 3.0, 3.1)).rules() == ["error"]


def test_a_session_that_expired_though_it_was_never_stopped_is_found(soak: Soak) -> None:
    assert soak.life(WAITER, point(Op.QUERY, Result.SESSION_EXPIRED, 3.0, 3.1)).rules() == ["expired"]


def test_a_session_whose_threads_could_not_run_may_expire(soak: Soak) -> None:
    soak.life(WAITER, Record(Op.LATE, Result.OK, start=2 * _S, end=3 * _S))
    assert soak.life(WAITER, point(Op.QUERY, Result.SESSION_EXPIRED, 4.0, 4.1)).rules() == []


def test_a_session_may_expire_while_the_machine_is_overloaded(soak: Soak) -> None:
    soak.life(OTHER, Record(Op.LATE, Result.OK, start=2 * _S, end=3 * _S))
    soak.life(WAITER, point(Op.QUERY, Result.SESSION_EXPIRED, 4.0, 4.1))
    assert soak.rules() == []


def test_a_session_that_expires_long_after_an_overload_is_found(soak: Soak) -> None:
    soak.life(OTHER, Record(Op.LATE, Result.OK, start=2 * _S, end=3 * _S))
    assert soak.life(WAITER, point(Op.QUERY, Result.SESSION_EXPIRED, 20.0, 20.1)).rules() == ["expired"]


def test_an_event_closed_under_its_user_is_found(soak: Soak) -> None:
    assert soak.life(WAITER, point(Op.QUERY, Result.EVENT_CLOSED, 3.0, 3.1)).rules() == ["closed"]


@pytest.mark.parametrize("op", [Op.CLOSE_WAITER, Op.DISCONNECT])
def test_an_event_that_its_user_closed_itself_may_be_closed(soak: Soak, op: Op) -> None:
    soak.life(WAITER, point(op, Result.BEGUN, 2.5, 2.5, 0), point(op, Result.OK, 2.5, 2.6, 0))
    assert soak.life(WAITER, point(Op.QUERY, Result.EVENT_CLOSED, 3.0, 3.1)).rules() == []


def test_file_descriptors_that_stay_open_are_found(soak: Soak) -> None:
    soak.life(WAITER, Record(Op.DESCRIPTORS, Result.OK, slot=18, generation=19))
    assert soak.rules() == ["leak"]


def test_a_worker_that_died_by_itself_is_found(soak: Soak) -> None:
    assert soak.deed(Op.EXIT, WAITER, 5.0, 256 + 11).rules() == ["died"]
