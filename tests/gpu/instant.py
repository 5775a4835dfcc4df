"""A pytest plugin: what became of each test is on disk before the next one, so that a run that is killed has told it.

    IPCSYNC_TEST_OUTCOMES=FILE pytest -p tests.gpu.instant

appends a line of JSON for each start and each outcome. A worker that dies amid a test is that test's failure.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

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


def pytest_configure(config: pytest.Config) -> None:
    """Write in the process that has all the reports."""
    path = os.environ.get("IPCSYNC_TEST_OUTCOMES")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(path))
