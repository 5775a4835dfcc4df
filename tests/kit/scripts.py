"""Scripts that an interpreter of their own runs, for what happens once in a process or at its end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest


def run(script: str, **env: str) -> None:
    """Run `script` in a fresh interpreter; it must end well. Exit status 77 skips: this machine lacks what it needs."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **env},
    )
    if done.returncode == 77:
        pytest.skip("needs two devices")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr


def run_on_two(script: str, **env: str) -> None:
    """Run `script` in a fresh interpreter that sees two devices."""
    segment = f"two-devices-{os.getpid()}"
    run(
        "import sys, ipcsync\nif ipcsync.device_count() < 2: sys.exit(77)\n" + textwrap.dedent(script),
        IPCSYNC_HOST_DEVICES="2",
        IPCSYNC_HOST_SEGMENT=segment,
        **env,
    )
