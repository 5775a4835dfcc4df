"""When waits on the host look and when they sleep, by the functions of patience.h themselves; the clock is a number."""

from __future__ import annotations

import ctypes
import random
import statistics
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ipcsync._engines

_HEADER = Path(ipcsync._engines.__file__).with_name("core_cython") / "patience.h"
_US, _MS = 1_000, 1_000_000
_SLEEP = 60 * _US
_LOOK, _LATE = 500, 6 * _US  # what a look takes, and how late a sleep ends
_PROGRAM = f"""
#include "{_HEADER}"
static struct patience patience;
static struct plan plan;
void forget(void) {{ patience = (struct patience){{0}}; }}
void begin(void) {{ plan = plan_of(&patience, {_SLEEP}); }}
int64_t pause_after(int64_t took) {{ return pause_of(&plan, took); }}
void over(int64_t took, int64_t blind) {{ learn(&patience, &plan, took, blind); }}
void interrupted(void) {{ interrupt(&patience); }}
int64_t soon(void) {{ return plan.soon; }}
int rests(void) {{ return patience.rests; }}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("patience")
    (folder / "patience.c").write_text(_PROGRAM)
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", folder / "p.so", folder / "patience.c"], check=True)
    library = ctypes.CDLL(str(folder / "p.so"))
    library.soon.restype = library.pause_after.restype = ctypes.c_int64
    library.pause_after.argtypes = [ctypes.c_int64]
    library.over.argtypes = [ctypes.c_int64, ctypes.c_int64]
    return library


@pytest.fixture
def patience(library: Any) -> Any:
    library.forget()
    return library


class Waited(NamedTuple):
    """How late a wait was, how long it looked, and how often it slept."""

    late: int
    looked: int
    sleeps: int


def _wait(patience: Any, lasts: float) -> Waited:
    """A wait for work that lasts so long."""
    patience.begin()
    took = looked = sleeps = step = 0
    while took < lasts:
        pause = patience.pause_after(took)
        step = pause + _LATE if pause else _LOOK
        sleeps += pause > 0
        looked += 0 if pause else _LOOK
        took += step
    patience.over(took, step)
    return Waited(took - int(lasts), looked, sleeps)


def _waits(patience: Any, times: Iterable[float]) -> list[Waited]:
    return [_wait(patience, lasts) for lasts in times]


def _median_late(waits: list[Waited]) -> float:
    return statistics.median(each.late for each in waits)


def _regular(mean: int, count: int, seed: int = 1) -> list[float]:
    """Times that vary by 5 %."""
    chance = random.Random(seed)
    return [chance.uniform(0.95, 1.05) * mean for _ in range(count)]


@pytest.mark.parametrize("mean", [_MS, 5 * _MS, 20 * _MS])
def test_regular_work_is_looked_at_when_it_ends_for_a_tenth_of_the_time_at_most(patience: Any, mean: int) -> None:
    _waits(patience, _regular(mean, 30))
    times = _regular(mean, 200, seed=2)
    waits = _waits(patience, times)
    assert _median_late(waits) <= 15 * _US
    assert statistics.quantiles((each.late for each in waits), n=10)[-1] <= 60 * _US
    assert sum(each.looked for each in waits) <= sum(times) / 10
    assert statistics.mean(each.sleeps for each in waits) < 3


def test_it_stays_so_where_one_wait_of_five_is_held_up(patience: Any) -> None:
    chance = random.Random(3)
    times = [lasts + chance.uniform(0, 3 * _MS) * (chance.random() < 0.2) for lasts in _regular(5 * _MS, 200)]
    waits = _waits(patience, times)
    assert _median_late(waits) <= 15 * _US
    assert sum(each.looked for each in waits) <= sum(times) / 10


def test_irregular_work_is_waited_for_without_a_guess(patience: Any) -> None:
    chance = random.Random(1)
    waits = _waits(patience, (chance.uniform(1, 20) * _MS for _ in range(200)))
    assert max(each.late for each in waits[16:]) <= 100 * _US
    assert sum(each.looked for each in waits[16:]) == 0, "nor looks it in vain"


@pytest.mark.parametrize("lasts", [10 * _MS, 100 * _MS, 1_000 * _MS, 60_000 * _MS])
def test_a_long_wait_sleeps_long_but_is_a_hundredth_late_at_most(patience: Any, lasts: int) -> None:
    waited = _wait(patience, lasts - 7)
    assert waited.late <= min(lasts / 100, 6 * _MS)
    assert waited.sleeps <= 1_600 + lasts / (4 * _MS)


def test_work_of_which_a_third_is_much_shorter_is_not_slept_for(patience: Any) -> None:
    waits = _waits(patience, [1 * _MS, 5 * _MS, 5 * _MS] * 30)
    assert max(each.late for each in waits[16:]) <= 100 * _US


@pytest.mark.parametrize("later", [2 * _MS, 8 * _MS, 20 * _MS])
def test_work_that_becomes_another_is_learned_anew(patience: Any, later: int) -> None:
    _waits(patience, [5 * _MS] * 20)
    waits = _waits(patience, [later] * 20)
    assert max(each.late for each in waits[3:]) <= _MS, "not more than three in turn sleep beyond their work's end"
    assert max(each.late for each in waits[7:]) <= 15 * _US, "and four are enough to know it again"


def test_one_exception_is_soon_forgotten(patience: Any) -> None:
    _waits(patience, [*[5 * _MS] * 20, 500 * _MS])
    assert max(each.late for each in _waits(patience, [5 * _MS] * 20)) <= 15 * _US


def test_who_always_sleeps_too_long_sleeps_less(patience: Any) -> None:
    """Each sleep ends 100 µs late, so that no look sees when the work really ended."""
    for _ in range(100):
        patience.begin()
        woke = patience.soon() + 100 * _US
        patience.over(max(5 * _MS, woke), woke if woke >= 5 * _MS else 0)
    patience.begin()
    assert patience.soon() < 5 * _MS


def test_the_first_look_is_as_long_as_a_sleep_shrinks_in_vain_and_comes_back(patience: Any) -> None:
    assert _wait(patience, _SLEEP - _LOOK).sleeps == 0
    assert _wait(patience, 10 * _MS).looked == pytest.approx(_SLEEP, rel=0.01)
    _waits(patience, [3 * _MS, 1 * _MS, 9 * _MS, 4 * _MS] * 4)
    assert _wait(patience, 3 * _MS).looked == 0
    short = [_wait(patience, 20 * _US) for _ in range(20)]
    assert short[0].sleeps == 1
    assert short[-1].sleeps == 0


def test_waits_that_last_a_little_longer_than_a_look_do_not_look(patience: Any) -> None:
    chance = random.Random(1)
    waits = _waits(patience, (chance.uniform(2, 10) * _SLEEP for _ in range(100)))
    assert sum(each.looked for each in waits[16:]) == 0


def test_after_interrupted_looks_more_and_more_waits_do_not_look_and_fewer_after_others(patience: Any) -> None:
    for _ in range(2):
        rests = []
        for _ in range(8):
            patience.interrupted()
            rests.append(patience.rests())
            assert sum(each.looked for each in _waits(patience, [_MS] * rests[-1])) == 0
            assert patience.rests() == 0
        assert rests == sorted(rests)
        assert rests[0] < rests[-1] < 50
        assert _waits(patience, [_MS] * 10)[-1].looked > 0
