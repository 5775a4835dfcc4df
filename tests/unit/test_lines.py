"""What `make coverage` notes of the lines that run: `tests.kit.lines`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.kit import lines
from tests.packaging import pythons

_ROOT = Path(__file__).parents[2]
_SOURCE = """\
import os, signal

def in_a_child():
    if os.getpid() == 0:
        never = 1
    os.kill(os.getpid(), signal.SIGKILL)

def here():
    os._exit(0)

if (child := os.fork()) == 0:
    in_a_child()
os.waitpid(child, 0)
here()
"""
_RUN = {1, 3, 4, 6, 8, 9, 11, 12, 13, 14}


@pytest.mark.process
def test_what_ran_before_a_kill_in_a_fork_and_before_an_immediate_exit_is_noted(tmp_path: Path) -> None:
    python = pythons.newest("3.12")
    if python is None:
        pytest.skip("sys.monitoring is there from Python 3.12 on, and there is none here")
    source, other = tmp_path / "ours.py", tmp_path / "other.py"
    source.write_text(_SOURCE)
    other.write_text("import ours\n")
    begins = 100
    (tmp_path / lines.INDEX).write_text(f"0 {tmp_path / 'absent.py'}\n{begins} {source}\n")
    (tmp_path / lines.NOTES).write_bytes(bytes(200))
    start = lines.START.format(folder=str(tmp_path))
    # Without what is in its site-packages, which may note lines itself.
    command = [
        str(python),
        "-S",
        "-c",
        f"import sys; sys.path[:0] = {[str(tmp_path), str(_ROOT)]}; {start}import other",
    ]
    subprocess.run(command, timeout=30, check=True)
    noted = (tmp_path / lines.NOTES).read_bytes()
    assert {at - begins for at, is_noted in enumerate(noted) if is_noted} == _RUN
