"""What the demo says of a run: why it failed, in words and as JSON, and its progress on a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ipcsync_demo import report
from ipcsync_demo.report import Restart, Result, StageRow

_ROW = StageRow(1, 42, 3, 100.0, 2.0, 9.0, 0)
_GOOD = Result("host", "timeline", False, 3, 3, 1.0, "aa", "aa", 0, None, [_ROW], Restart(2, 3, 3))


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (_GOOD, None),
        (replace(_GOOD, restart=None), None),
        (replace(_GOOD, sha256="bb", corrupt_chunks=2, first_corrupt=1), "although every stage waits: 2 of 3 chunks"),
        (replace(_GOOD, sha256="bb", without_waits=True), "corrupt without the waits"),
        (replace(_GOOD, without_waits=True), "not corrupt: so the check proves nothing"),
        (replace(_GOOD, without_waits=True, chunks=0), "there was nothing to hand on"),
        (replace(_GOOD, stages=[_ROW, replace(_ROW, stage=2, messages=5)]), "stage 2 sent 5 messages"),
        (replace(_GOOD, restart=Restart(1, 3, 3)), "no other one was started"),
        (replace(_GOOD, restart=Restart(2, 1, 3)), "1 of 3 sessions are left"),
    ],
)
def test_a_run_is_a_success_or_says_why_not(
    capsys: pytest.CaptureFixture[str], result: Result, why: str | None
) -> None:
    assert (result.reason is None) == (why is None)
    assert why is None or why in str(result.reason)
    report.present(result, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["ok"], said["reason"]) == (why is None, result.reason)
    report.present(result, as_json=False)
    text = capsys.readouterr().out
    assert ("equal: no stage read" in text) == (why is None)
    restart = result.restart
    assert ("knows all 3 sessions" in text) == (restart is not None and restart.reason is None)


def test_progress_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with report.Progress(1000) as progress:
            progress.show("copying", 250)
    said = b"".join(_until_end(ours)).decode()
    os.close(ours)
    assert "copying" in said
    assert "0.2/1.0 kB" in said


def _until_end(terminal: int) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # EIO: all has come, and nobody has the other end
        while True:
            yield os.read(terminal, 4096)
