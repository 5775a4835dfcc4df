"""The daemon's log: one line an event whatever a name holds, in both formats, and never a token."""

from __future__ import annotations

import ast
import base64
import io
import json
import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import ipcsync
from ipcsync import _logs as logs
from ipcsync._logs import Lines, Unwaiting, fields, is_round, quoted
from tests.kit.examples import examples
from tests.kit.until import until

_ROOT = Path(__file__).parents[3]
_PAIR = re.compile(r'([a-z_]+)=((?:"(?:[^"\\]|\\.)*")|[^\s"=]*)(?: |$)')
_FORGED = 'x\ntime=2030-01-01T00:00:00.000Z level=info event="session lost" name="a" b\\'


def _written(formatter: logging.Formatter, message: str, *args: object, **options: Any) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("ipcsync.test")
    logger.addHandler(handler)
    logger.error(message, *args, **options)
    return stream.getvalue()


def _parsed(line: str) -> dict[str, str]:
    """The pairs of a line, which must be nothing but pairs."""
    pairs, at = {}, 0
    while at < len(line):
        found = _PAIR.match(line, at)
        assert found, line[at:]
        value = found[2]
        pairs[found[1]] = str(ast.literal_eval(value)) if value.startswith('"') else value
        at = found.end()
    return pairs


@examples(300)
@given(st.text())
@example(_FORGED)
@example('a" level=error b="c')
@example("a b=c")
@example("")
@example("a\u2028b\u2029c\x85d\x0be\u202ef\U000e0001")
@example("\\n")
@example("{'a': 1} %s %(x)s")
def test_whatever_a_name_holds_it_is_one_value_on_one_line(name: str) -> None:
    line = _written(Lines(), "session lost", extra=fields(name=name, pid=7))
    assert line.endswith("\n")
    assert len(line.splitlines()) == 1
    pairs = _parsed(line[:-1])
    assert list(pairs) == ["time", "level", "event", "name", "pid"]
    assert (pairs["level"], pairs["event"], pairs["name"], pairs["pid"]) == ("error", "session lost", name, "7")
    line = _written(Lines(as_json=True), "session lost", extra=fields(name=name, pid=7))
    assert len(line.splitlines()) == 1
    read = json.loads(line)
    assert (read["level"], read["event"], read["name"], read["pid"]) == ("error", "session lost", name, 7)


@pytest.mark.parametrize("is_json", [False, True])
def test_a_message_or_a_traceback_cannot_begin_a_line_of_its_own(is_json: bool) -> None:
    try:
        raise ValueError(_FORGED)
    except ValueError:
        line = _written(Lines(as_json=is_json), "failed: %s", _FORGED, exc_info=True)
    assert len(line.splitlines()) == 1
    pairs = json.loads(line) if is_json else _parsed(line[:-1])
    assert pairs["event"] == f"failed: {_FORGED}"
    assert "ValueError: x\ntime=2030" in pairs["traceback"]


def test_plain_values_stand_without_quotes() -> None:
    assert [quoted(value) for value in ("kv/a", 7, 0.5, "", "a b", 'a"', None, "一")] == [
        "kv/a",
        "7",
        "0.5",
        '""',
        '"a b"',
        r'"a\""',
        "None",
        '"一"',
    ]


def test_what_happens_often_is_told_seldom() -> None:
    assert [count for count in range(1, 2000) if is_round(count)] == [1, 10, 100, 1000]


def test_a_librarys_warning_that_comes_again_and_again_is_told_seldom_and_with_its_count() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Lines())
    handler.addFilter(logs.Seldom())
    logger = logging.Logger("asyncio")
    logger.addHandler(handler)
    for number in range(120):
        logger.warning("no effect of %s", "x")
        if number == 50:
            logger.warning("once")
        if number % 60 == 0:
            logger.error("an error")
    lines = [_parsed(line) for line in stream.getvalue().splitlines()]
    assert [(line["event"], line.get("count")) for line in lines] == [
        ("no effect of x", None),
        ("an error", None),
        ("no effect of x", "10"),
        ("once", None),
        ("an error", None),
        ("no effect of x", "100"),
    ]


def test_a_librarys_warning_that_cannot_be_written_is_no_error_of_its_caller() -> None:
    assert logs.Seldom().filter(logging.LogRecord("nats", logging.WARNING, "", 0, "a %d", ("no number",), None))


def test_a_librarys_warnings_that_all_differ_fill_no_memory() -> None:
    seldom = logs.Seldom()
    for number in range(3 * logs._MOST_TEXTS):
        assert seldom.filter(logging.LogRecord("nats", logging.WARNING, "", 0, "a %d", (number,), None))
    assert len(seldom._counts) <= logs._MOST_TEXTS


def test_messages_are_fixed_texts_with_what_they_tell_of_beside_them() -> None:
    """So that no name can reach a message's text, in which nobody could tell it from the rest."""
    for path in (_ROOT / "services").glob("ipcsync_*/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {
                f"log.{level}" for level in ("debug", "info", "warning", "error", "exception")
            }:
                (message,) = node.args
                assert isinstance(message, ast.Constant), f"{path.name}:{node.lineno}"


@pytest.mark.process
def test_warnings_and_asyncios_words_are_lines_of_the_same_kind() -> None:
    code = (
        "import asyncio, logging, warnings\n"
        "from ipcsync import _logs as logs\n"
        "logs.configure('info', as_json=False)\n"
        "warnings.warn('some\\nthing')\n"
        "logging.getLogger('asyncio').error('a\\nb')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    lines = [_parsed(line) for line in done.stderr.splitlines()]
    assert [line["level"] for line in lines] == ["warning", "error"]
    assert lines[1]["event"] == "a\nb"


# --- a full run -------------------------------------------------------------------------------------------------------


def _spellings(token: bytes) -> list[str]:
    return [
        token.hex(),
        token.hex().upper(),
        repr(token)[2:-1],
        base64.b64encode(token).decode().rstrip("="),
        base64.urlsafe_b64encode(token).decode().rstrip("="),
        str(list(token))[1:-1],
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_full_runs_log_has_every_session_and_no_token(
    new_coordinator: Callable[..., ipcsync.Coordinator], as_json: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    coordinator = new_coordinator(log_level="debug", log_json=as_json)
    name = 'a "b" level=error'
    tokens = []
    with ipcsync.connect(coordinator.endpoint, name=name) as client, ipcsync.connect(coordinator.endpoint) as other:
        tokens = [client._session.token, other._session.token]
        with client.event(name, recorder=True) as event:
            other.point(bytes(event.record(ipcsync.Stream()))).synchronize(10)
            with pytest.raises(ipcsync.RecorderTaken):
                other.event(name, recorder=True)
        session_ids = {client.session_id, other.session_id}
    coordinator.stop()
    text = until(lambda: capfd.readouterr().err, "the log")
    for token in tokens:
        for spelling in _spellings(token):
            assert spelling not in text
    lines = [json.loads(line) if as_json else _parsed(line) for line in text.splitlines()]
    told = {(line["event"], line.get("id")) for line in lines}
    assert told >= {(event, id_) for event in ("session opened", "session closed") for id_ in session_ids}
    assert {"ready", "stopped"} <= {event for event, _ in told}
    assert {line["name"] for line in lines if "name" in line} == {name, ""}
    assert {line["event"] for line in lines if line.get("slot") is not None} == {"event opened", "event closed"}
    assert logs.is_round(1)


@dataclass
class Pipe:
    """A pipe that nobody reads, and a logger that writes to it."""

    read: int
    write: int
    logger: logging.Logger
    handler: Unwaiting

    def content(self) -> str:
        """What it holds, which it does not afterwards."""
        return os.read(self.read, 1 << 20).decode()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """A pipe as a service's stderr."""
    read, write = os.pipe()
    handler, logger = Unwaiting(write), logging.Logger("ipcsync.test")
    handler.setFormatter(Lines())
    logger.addHandler(handler)
    yield Pipe(read, write, logger, handler)
    for descriptor in {read, write, handler._descriptor}:
        os.close(descriptor)


def test_a_reader_that_stopped_costs_lines_and_no_time_and_is_told_how_many(pipe: Pipe) -> None:
    for number in range(2000):  # more than a pipe holds; written with a wait, this never ends
        pipe.logger.error("line", extra=fields(number=number, text="x" * 100))
    lines = pipe.content().splitlines()
    pipe.logger.error("after", extra=fields(name="n"))
    last = _parsed(pipe.content().splitlines()[-1])
    assert [_parsed(line)["number"] for line in lines[:-1]] == [str(number) for number in range(len(lines) - 1)]
    assert (last["event"], last["name"]) == ("after", "n")
    assert 2000 - len(lines) <= int(last["dropped"]) <= 2000 - len(lines) + 1


@pytest.mark.parametrize("late_s", [0.08, 0.005, 0.002, 0.0009])
def test_a_reader_that_is_late_again_and_again_costs_a_tenth_of_the_time(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    now_s, waited_s, free_s = time.monotonic(), 0.0, 0.0
    until_s = now_s + 10.0

    def poll(timeout_ms: float) -> list[int]:
        """As the kernel's, in whole milliseconds: there is room so long after the last line."""
        nonlocal now_s, waited_s
        slept_s = max(0.0, min(free_s - now_s, math.ceil(timeout_ms) / 1000))
        now_s, waited_s = now_s + slept_s, waited_s + slept_s
        return [1] if now_s >= free_s else []

    clock = SimpleNamespace(monotonic=lambda: now_s, strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(logs, "time", clock)
    monkeypatch.setattr(pipe.handler, "_poll", SimpleNamespace(poll=poll))
    written = 0
    while now_s < until_s:
        now_s += 0.0002  # what the service does meanwhile
        pipe.logger.error("line")
        if not pipe.handler._dropped:
            written, free_s = written + 1, now_s + late_s
            pipe.content()
    assert waited_s <= 0.1 * 10.0 + logs._MOMENT_MS / 1000
    assert written > 10.0 / late_s / 2, "nearly each time that there was room"


def test_a_reader_that_is_late_once_costs_no_line(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_ms: list[float] = []

    def poll(timeout_ms: float) -> list[int]:
        asked_ms.append(timeout_ms)
        return [1] if timeout_ms >= 80 else []

    monkeypatch.setattr(pipe.handler, "_poll", SimpleNamespace(poll=poll))
    pipe.logger.error("line")
    assert asked_ms == [logs._MOMENT_MS]
    assert _parsed(pipe.content().strip("\n"))["event"] == "line"


def test_a_line_that_is_longer_than_a_pipe_holds_is_cut_and_the_next_one_whole(pipe: Pipe) -> None:
    pipe.logger.error("long", extra=fields(text="x" * (1 << 20)))
    assert pipe.content().endswith("x")
    pipe.logger.error("next")
    assert _parsed(pipe.content().strip("\n"))["event"] == "next"


def test_a_line_for_which_another_process_took_the_room_is_dropped(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.get_blocking(pipe.write), "the parent's own open file stays as it is"
    pipe.logger.error("first", extra=fields(text="x" * (1 << 20)))
    with monkeypatch.context() as patch:
        patch.setattr(pipe.handler, "_has_room", lambda: True)  # as it was a moment ago
        pipe.logger.error("dropped")
    pipe.content()
    pipe.logger.error("last")
    assert _parsed(pipe.content().strip("\n"))["dropped"] == "1"
