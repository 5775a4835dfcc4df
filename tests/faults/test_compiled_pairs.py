"""Two words of the compiled core that are read together without a lock, by threads that no GIL keeps apart."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.faults.compiled_rig import Changes, planted

pytestmark = pytest.mark.process

# The stores of two writes are noted. Then a pair is read in every order in which its loads can fall among these stores.
_PROGRAM = r"""
#include <stdint.h>
static uint64_t *places[16], values[16];
static int noted, carried_out, loads, until[8], is_reading;
static void carry_out(int count) {
    for (; carried_out < count; carried_out++) *places[carried_out] = values[carried_out];
}
static void store(uint64_t *place, uint64_t value) {
    places[noted] = place;
    values[noted++] = value;
    carry_out(noted);
}
static void before_load(void) {
    if (is_reading) carry_out(until[loads++]);
}
#define __atomic_store_n(place, value, order) store(place, value)
#define __atomic_load_n(place, order) (before_load(), *(place))
#include "words.h"
#include <stdio.h>
int main(void) {
    static struct ipcsync_pair pair;
    int good = 0, refused = 0, misfits = 0;
    pair.second = ~pair.first;
    struct ipcsync_pair before = pair;
    ipcsync_put_pair(&pair, 1, ~(uint64_t)1);
    ipcsync_put_pair(&pair, 2, ~(uint64_t)2);
    is_reading = 1;
    for (until[0] = 0; until[0] <= noted; until[0]++)
        for (until[1] = until[0]; until[1] <= noted; until[1]++)
            for (until[2] = until[1]; until[2] <= noted; until[2]++)
                for (until[3] = until[2]; until[3] <= noted; until[3]++) {
                    uint64_t first = 0, second = 0;
                    pair = before;
                    carried_out = loads = 0;
                    if (!ipcsync_get_pair(&pair, &first, &second)) refused++;
                    else if (second == ~first) good++;
                    else misfits++;
                }
    printf("%d %d %d", good, refused, misfits);
}
"""


def _found(folder: Path, changes: Changes = ()) -> list[int]:
    """How often a pair was read that fits, none was read, and one that does not fit."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    source, program = folder / "pairs.c", folder / "pairs"
    source.write_text(_PROGRAM)
    flags = ["-O1", "-Wall", "-Wno-unused-function", f"-I{planted(folder, changes)}"]
    subprocess.run(["cc", *flags, str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=100)
    return [int(number) for number in done.stdout.split()]


def test_a_pair_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    good, refused, misfits = _found(tmp_path)
    assert (good, misfits) == (3, 0), "before, between and behind the writes"
    assert refused == 492


def test_a_pair_whose_version_is_not_compared_does_not_fit(tmp_path: Path) -> None:
    _, _, misfits = _found(
        tmp_path, [("return version % 2 == 0 && ipcsync_load(&pair->version) == version;", "return 1;")]
    )
    assert misfits > 100
