"""What the observer serves is as its OpenAPI description says, by schemathesis, which asks for what fits it and not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import ipcsync
from ipcsync_observer.app import openapi
from tests.observer.observing import Observer

_MOST_S = 500  # on a machine that does much else; schemathesis alone takes seconds to import

pytestmark = [pytest.mark.process, pytest.mark.timeout(_MOST_S + 60)]


def _check(
    observer: Observer, description: dict[str, Any], directory: Path, *more: str
) -> subprocess.CompletedProcess[str]:
    """Have schemathesis ask for everything but the stream, which does not end."""
    path = directory / "openapi.json"
    path.write_text(json.dumps(description))
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(path), "--url", observer.url]
    options = ["--exclude-path", "/api/stream", "--max-examples", "20", "--seed", "1", "--no-color"]
    return subprocess.run(
        [*command, *options, *more], capture_output=True, text=True, timeout=_MOST_S, check=False, cwd=directory
    )


@pytest.mark.thorough
def test_every_answer_is_as_described(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, new_observer: Callable[..., Observer], tmp_path: Path
) -> None:
    observer = new_observer("--endpoint", coordinator.endpoint)
    observer.until_ready()
    stream = ipcsync.Stream()
    with client.event("e", recorder=True) as one, client.event("t", recorder=True, engine="timeline") as other:
        one.record(stream).synchronize(10)
        other.record(stream).synchronize(10)
        observer.until(lambda state: len(state["events"]) == 2 and state["links"], "the events are seen")
        done = _check(observer, json.loads(observer.get("/openapi.json")[1]), tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.thorough
def test_so_it_is_without_a_coordinator(new_observer: Callable[..., Observer], tmp_path: Path) -> None:
    observer = new_observer("--endpoint", f"ipc://{tmp_path}/none")
    described = json.loads(observer.get("/openapi.json")[1])
    done = _check(
        observer, described, tmp_path, "--exclude-checks", "not_a_server_error"
    )  # 503 says that it is not ready
    assert done.returncode == 0, done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("wrongly_told", ["sessions_total", "problem"])
def test_an_answer_that_is_not_as_described_is_found(
    coordinator: ipcsync.Coordinator, new_observer: Callable[..., Observer], tmp_path: Path, wrongly_told: str
) -> None:
    observer = new_observer("--endpoint", coordinator.endpoint)
    observer.until_ready()
    wrong = openapi()
    wrong["components"]["schemas"]["State"]["properties"][wrongly_told] = {"type": "null"}
    done = _check(observer, wrong, tmp_path)
    assert done.returncode == 1, done.stdout
    assert wrongly_told in done.stdout


def test_no_field_is_undescribed(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, new_observer: Callable[..., Observer]
) -> None:
    """Schemathesis lets an answer have more than is described, whatever the description says of that."""
    observer = new_observer("--endpoint", coordinator.endpoint)
    described = json.loads(observer.get("/openapi.json")[1])
    check = Draft202012Validator({**described, "$ref": "#/components/schemas/State"})
    with client.event("e", recorder=True):
        check.validate(observer.until(lambda state: state["events"] and state["links"] and state, "it is seen"))
        wrong = openapi()
        del wrong["components"]["schemas"]["State"]["properties"]["links"]
        assert not Draft202012Validator({**wrong, "$ref": "#/components/schemas/State"}).is_valid(observer.state())
