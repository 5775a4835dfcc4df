"""LMCache's own tests of its events on a GPU, with ipcsync's as a further kind beside its two.

    python -m tests.gpu.lmcache_tests DIRECTORY [pytest's options]

DIRECTORY has the two files of its source distribution that are named below. Exit status: pytest's; 2 if they are not
what this program knows.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ipcsync

ORDERING, KINDS = "test_event_ipc_ordering.py", "test_timeline_semaphore_event_ipc.py"
_OURS = "from ipcsync.integrations.lmcache import IpcSyncEventBackend\n"

# In each file, what makes a backend, and what makes one of ours too.
_CHANGES = {
    ORDERING: (
        (
            "from lmcache.v1.platform.base.event_ipc import get_event_ipc_backend\n",
            f"{_OURS}\n\ndef get_event_ipc_backend(device):\n    return IpcSyncEventBackend()\n",
        ),
    ),
    KINDS: (
        (
            "    return DefaultEventIPCBackend()\n",
            f"    if kind == 'ipcsync':\n        {_OURS}\n        return IpcSyncEventBackend()\n"
            "    return DefaultEventIPCBackend()\n",
        ),
        ('["default", "timeline_semaphore"]', '["default", "timeline_semaphore", "ipcsync"]'),
    ),
}


def are_in(directory: Path) -> bool:
    """Whether the two files are there."""
    return all((directory / name).is_file() for name in _CHANGES)


def prepare(directory: Path, target: Path) -> list[Path]:
    """Write them into `target`: the ordering test as it is and with our events, the others with a further kind.

    Raises ValueError if a file lacks what is to be changed.
    """
    made = [target / ORDERING]
    made[0].write_text((directory / ORDERING).read_text())
    for name, changes in _CHANGES.items():
        text = (directory / name).read_text()
        for old, new in changes:
            if old not in text:
                raise ValueError(f"{name} has no {old.strip()!r}: this is another version of LMCache")
            text = text.replace(old, new)
        made.append(target / (name.removesuffix(".py") + "_with_ipcsync.py"))
        made[-1].write_text(text)
    return made


def main(directory: Path, options: Sequence[str]) -> int:
    """The command line."""
    with tempfile.TemporaryDirectory(prefix="ipcsync-lmcache-") as folder, ipcsync.launch() as coordinator:
        try:
            files = prepare(directory, Path(folder))
        except ValueError as error:
            sys.stderr.write(f"{error}\n")
            return 2
        env = {
            **os.environ,
            "IPCSYNC_ENDPOINT": coordinator.endpoint,
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
        }
        plugins = ["-p", "timeout", "-p", "no:cacheprovider", "-p", "no:ipcsync", "-W", "default"]
        command = [sys.executable, "-m", "pytest", "-q", *plugins, "--timeout=90", f"--rootdir={folder}", *options]
        return subprocess.run([*command, *map(str, files)], cwd=folder, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))
