"""A running observer for a test, and what it serves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.kit.until import DEADLINE_S, until

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
PERIOD_S = 0.1


class Observer:
    """A running observer; `log` is what it wrote."""

    def __init__(self, log: Path, *arguments: str, **env: str) -> None:
        self.log = log
        with log.open("w") as file:
            command = [sys.executable, "-m", "ipcsync_observer", "--port", "0", "--period", str(PERIOD_S), *arguments]
            self.process = subprocess.Popen(command, stderr=file, env={**os.environ, **env})
        found = until(self._ready, "the observer serves")
        self.url = found[1]

    def _ready(self) -> re.Match[str] | None:
        assert self.process.poll() is None, self.log.read_text()
        return re.search(r"event=ready url=(\S+)/$", self.log.read_text(), re.MULTILINE)

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        """Status and text of an answer."""
        try:
            with DIRECT.open(urllib.request.Request(self.url + path, headers=headers), timeout=DEADLINE_S) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def state(self, query: str = "") -> Any:
        """What /api/state tells."""
        return json.loads(self.get(f"/api/state{query}")[1])

    def metrics(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Every sample by name and the values of its labels."""
        families = text_string_to_metric_families(self.get("/metrics")[1])
        return {
            (sample.name, tuple(sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
        }

    def until(self, holds: Callable[[Any], object], what: str) -> Any:
        """The first state of which something holds."""
        found: list[Any] = []

        def look() -> object:
            found[:] = [self.state()]
            return holds(found[0])

        until(look, what)
        return found[0]

    def until_ready(self) -> Any:
        return self.until(lambda state: state["ready"], "the coordinator is seen to be ready")

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(DEADLINE_S)


@contextmanager
def running(directory: Path) -> Iterator[Callable[..., Observer]]:
    """A function that starts observers, which end with the block; their logs go to `directory`."""
    started: list[Observer] = []

    def start(*arguments: str, **env: str) -> Observer:
        started.append(Observer(directory / f"observer-{len(started)}.log", *arguments, **env))
        return started[-1]

    try:
        yield start
    finally:
        for one in started:
            one.process.kill()
            one.process.wait(DEADLINE_S)
