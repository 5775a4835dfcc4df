"""What waits on the host learn of how long they last, by the functions of parking.h themselves."""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import ipcsync._engines

_HEADER = Path(ipcsync._engines.__file__).with_name("core_cython") / "parking.h"
_PROGRAM = f"""
#include "{_HEADER}"
static struct patience patience;
void begin(void) {{ patience = (struct patience){{0}}; sleep_ns = 60000; }}
void waited(int64_t took, int is_late) {{ learn(&patience, took, is_late); }}
void interrupted(void) {{ interrupt(&patience); }}
int64_t soon(void) {{ return soon_after(&patience); }}
int64_t first_look(void) {{ return sleep_ns >> patience.vain; }}
int rests(void) {{ return patience.rests; }}
"""
_US, _MS = 1_000, 1_000_000
_SLEEP = 60 * _US


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("patience")
    (folder / "patience.c").write_text(_PROGRAM)
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", folder / "p.so", folder / "patience.c"], check=True)
    library = ctypes.CDLL(str(folder / "p.so"))
    library.soon.restype = library.first_look.restype = ctypes.c_int64
    library.waited.argtypes = [ctypes.c_int64, ctypes.c_int]
    return library


@pytest.fixture
def patience(library: Any) -> Any:
    library.begin()
    return library


def _wait(patience: Any, times: Iterable[float]) -> None:
    """Waits for work that lasts so long; one that slept beyond its end learns that late."""
    for took in times:
        soon = patience.soon()
        patience.waited(int(max(took, soon)), int(took < soon))


@pytest.mark.parametrize("mean", [_MS, 5 * _MS, 20 * _MS])
def test_of_regular_work_it_knows_shortly_before_when_it_is_due(patience: Any, mean: int) -> None:
    chance, missed = random.Random(1), 0
    _wait(patience, (chance.uniform(0.95, 1.05) * mean for _ in range(30)))
    for _ in range(200):
        took = chance.uniform(0.95, 1.05) * mean
        missed += not patience.soon() <= took < patience.soon() / 0.9
        _wait(patience, [took])
    assert missed < 50, "it looks when the work ends, and a tenth of the time at most"


def test_irregular_work_is_waited_for_without_a_guess(patience: Any) -> None:
    chance = random.Random(1)
    for _ in range(200):
        _wait(patience, [chance.uniform(1 * _MS, 10 * _MS)])
    assert patience.soon() == 0


@pytest.mark.parametrize("later", [2 * _MS, 8 * _MS, 20 * _MS])
def test_work_that_becomes_another_is_learned_anew(patience: Any, later: int) -> None:
    _wait(patience, [5 * _MS] * 20)
    _wait(patience, [later] * 3)
    assert patience.soon() <= later, "not more than three in turn sleep beyond their work's end"
    _wait(patience, [later] * 30)
    assert 0.9 * later < patience.soon() <= later


def test_one_exception_is_soon_forgotten(patience: Any) -> None:
    _wait(patience, [5 * _MS] * 20 + [500 * _MS] + [5 * _MS] * 20)
    assert 0.9 * 5 * _MS < patience.soon() <= 5 * _MS


def test_who_always_sleeps_too_long_sleeps_less(patience: Any) -> None:
    """Each sleep ends 100 µs late, so that no look sees when the work really ended."""
    for _ in range(100):
        patience.waited(max(5 * _MS, patience.soon() + 100 * _US), int(patience.soon() + 100 * _US >= 5 * _MS))
    assert patience.soon() < 5 * _MS


def test_the_first_look_is_as_long_as_a_sleep_shrinks_in_vain_and_comes_back(patience: Any) -> None:
    assert patience.first_look() == _SLEEP
    _wait(patience, [3 * _MS, 1 * _MS, 9 * _MS, 4 * _MS] * 10)
    assert patience.first_look() == 0
    _wait(patience, [_SLEEP + 20 * _US] * 30)  # found at the first look after the shortest sleep
    assert patience.first_look() == _SLEEP
    _wait(patience, [3 * _MS])
    assert patience.first_look() == _SLEEP // 2
    _wait(patience, [10 * _US])
    assert patience.first_look() == _SLEEP


def test_after_interrupted_looks_more_and_more_waits_do_not_look_and_fewer_after_others(patience: Any) -> None:
    for _ in range(2):
        rests = []
        for _ in range(8):
            patience.interrupted()
            rests.append(patience.rests())
            _wait(patience, [_MS] * rests[-1])
            assert patience.rests() == 0
        assert rests == sorted(rests)
        assert rests[0] < rests[-1] < 50
        _wait(patience, [_MS] * 10)
