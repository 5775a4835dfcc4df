"""A pytest plugin: what became of each test is on disk before the next one, so that a run that is killed has told it.

    IPCSYNC_TEST_OUTCOMES=FILE pytest -p tests.gpu.instant

appends a line of JSON for each start and each outcome. A worker that dies amid a test is that test's failure. Of a test
that takes long, the stacks of all threads are in `stacks.txt` beside FILE.
"""

from __future__ import annotations

import faulthandler
import json
import os
from pathlib import Path
from typing import Any

import pytest

_LONG_S = 20  # less than a worker's limit, at which it ends without a word
_LONGEST = 6000  # characters of a trace, and of what was printed


class _Writer:
    def __init__(self, path: str) -> None:
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - as long as the run
        self._step = os.environ.get("IPCSYNC_TEST_STEP", "")

    def _write(self, test: str, what: str, **more: Any) -> None:
        self._file.write(json.dumps({"step": self._step, "test": test, "what": what, **more}) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        said = {} if report.passed else {"message": str(crash.message if crash else report.longrepr)[:_LONGEST]}
        if report.failed:
            printed = "".join(text for _, text in report.sections)
            said["trace"] = f"{str(report.longrepr)[-_LONGEST:]}\n{printed[-_LONGEST:]}"
        self._write(report.nodeid, report.outcome, when=report.when, seconds=round(report.duration, 2), **said)


class _Stacks:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def pytest_runtest_setup(self) -> None:
        faulthandler.dump_traceback_later(_LONG_S, file=self._file)

    def pytest_runtest_logfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()


def pytest_configure(config: pytest.Config) -> None:
    """Write outcomes in the process that has all the reports, and stacks in each that runs tests."""
    path = os.environ.get("IPCSYNC_TEST_OUTCOMES")
    if path:
        config.pluginmanager.register(_Stacks(Path(path).with_name("stacks.txt")))
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(path))
