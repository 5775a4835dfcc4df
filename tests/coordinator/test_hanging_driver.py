"""A driver's call that hangs in a coordinator, or in its keeper: the rest goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import ipcsync
from tests.faults import fixtures
from tests.kit.until import DEADLINE_S, until

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        pytest.param([], 0, id="alone"),
        pytest.param(["--keeper"], signal.SIGKILL, id="its coordinator killed"),
        pytest.param(["--keeper"], signal.SIGSTOP, id="its coordinator hanging", marks=pytest.mark.thorough),
    ],
)
def test_row_60_a_drivers_call_that_hangs_stops_only_what_needs_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], number: int
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    monkeypatch.setenv("IPCSYNC_TEST_SCRIPT", str(hold))
    with fixtures.launch_patched("hanging-driver", fixtures.private_dir(), *flags) as one:
        with ipcsync.connect(one.endpoint, timeout=DEADLINE_S) as client:
            with pytest.raises(ipcsync.EngineMismatch, match=r"driver (did not answer within|has not answered)"):
                client.event("held", recorder=True, engine="event", timeout=DEADLINE_S)
            for _ in flags:  # the next coordinator serves all else, too
                os.kill(client.stats(timeout=DEADLINE_S)["pid"], number)
                assert client.stats(timeout=DEADLINE_S)["starts"] > 1
            assert client.stats(timeout=DEADLINE_S)["sessions"] == 1
            hold.unlink()

        def works() -> bool:
            with ipcsync.connect(one.endpoint, timeout=DEADLINE_S) as client:
                try:
                    client.event("held", recorder=True, engine="event", timeout=DEADLINE_S).record().synchronize()
                except ipcsync.EngineMismatch:
                    return False
                return True

        until(works, "the driver works again")
