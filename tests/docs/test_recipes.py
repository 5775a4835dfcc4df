"""Each recipe runs by its command and checks its own result, and is wrong without its waits."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import ipcsync
from ipcsync.testing import Memory, StreamGate
from tests.fleet import nodes as fleet
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = [pytest.mark.process, pytest.mark.program]

_RECIPES = Path(__file__).parents[2] / "services" / "recipes"
_PARTS = {"processes"}
_NAMES = sorted(path.stem for path in _RECIPES.glob("*.py") if path.stem not in _PARTS)
_DEADLINE_S = 90.0
_ON_EACH_DRIVER = {"graph_layers", "kv_handover", "two_nodes"}
assert set(_NAMES) >= _ON_EACH_DRIVER
_ORDERED_BY_WAITS = ["cache_daemon", "encoder_fanout", "kv_handover", "weight_refresh"]

# Python imports it at the start of every process that finds it on its path, so of those too that a recipe starts.
_WITHOUT_WAITS = """
from ipcsync.client import Point

Point.wait = lambda self, stream=None, **options: None
"""


def _run(name: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "PYTHONWARNINGS": "error", **env}
    command = [sys.executable, str(_RECIPES / f"{name}.py"), *arguments]
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)


def _skip_without_its_server(name: str) -> None:
    reason = fleet.why_not() if name == "two_nodes" else None
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.driver) if n in _ON_EACH_DRIVER else n for n in _NAMES]
)
def test_a_recipe_runs_by_its_command(name: str) -> None:
    _skip_without_its_server(name)
    done = _run(name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 1 <= len(done.stdout.splitlines()) <= 12
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", _NAMES)
def test_a_recipe_says_what_goes_wrong_without_ipcsync(name: str) -> None:
    text = (_RECIPES / f"{name}.py").read_text()
    assert "Without ipcsync" in text
    assert f"python services/recipes/{name}.py" in text


def test_two_nodes_shows_what_happens_if_it_records_before_the_transfer_is_over() -> None:
    _skip_without_its_server("two_nodes")
    done = _run("two_nodes", "--break")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "was read before it was there" in done.stderr


def test_graph_layers_shows_what_happens_if_its_graph_does_not_wait() -> None:
    done = _run("graph_layers", "--break")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "was read before it was written" in done.stderr


def test_a_recipe_uses_the_coordinator_that_is_there(coordinator: ipcsync.Coordinator, client: ipcsync.Client) -> None:
    before = client.stats()["requests"]["hello"]
    done = _run("kv_handover", IPCSYNC_ENDPOINT=coordinator.endpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    assert client.stats()["requests"]["hello"] == before + 2


@pytest.mark.planted
@pytest.mark.parametrize("name", _ORDERED_BY_WAITS)
def test_a_recipe_fails_when_its_waits_are_taken_out(name: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_WITHOUT_WAITS)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    # An idle stream of the software driver does its work within the call: with asynchronous work, a copy that does not
    # wait could still be late enough to be right.
    done = _run(name, PYTHONPATH=path, IPCSYNC_DRIVER="host", IPCSYNC_HOST_ASYNC="0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "before it was" in done.stderr


# Who has queued work behind a gate is killed when it would open it: that work stays open for ever, and the others have
# queued theirs behind it.
_KILLED_AT_ITS_GATE = """
import os, signal
from ipcsync.testing import StreamGate

StreamGate.__exit__ = lambda self, *_: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        pytest.param(name, engine, marks=[] if (number + offset) % 2 else pytest.mark.thorough)
        for number, name in enumerate([*_ORDERED_BY_WAITS, "graph_layers"])
        for offset, engine in enumerate(("event", "timeline"))
    ],
)
def test_in_a_recipe_nobody_outlives_a_killed_peer_by_long(name: str, engine: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_KILLED_AT_ITS_GATE)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.recipe_bereaved", str(_RECIPES / f"{name}.py")],
        env={**os.environ, "PYTHONPATH": path, "IPCSYNC_ENGINE": engine},
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    ended = dict(line.split(": ") for line in done.stdout.splitlines() if ": " in line)
    codes = [code for who, code in ended.items() if code.lstrip("-").isdigit() or code == "None"]
    assert "-9" in codes, done.stdout + done.stderr
    assert "None" not in codes, done.stdout + done.stderr
    assert "RecorderLost" in done.stderr or "EOFError" in done.stderr


_held: list[object] = []


def _hold(endpoint: str) -> None:
    """In a peer: record behind a gate."""
    client, stream = ipcsync.connect(endpoint, prefix="ring/"), ipcsync.Stream()
    _held.extend((client, event := client.event("written", recorder=True), StreamGate(stream)))
    event.record(stream)


def _consume(endpoint: str) -> str:
    """In a peer: the ring's consumer; what ends it."""
    sys.path.insert(0, str(_RECIPES))
    import served_ring

    slots, mine = [Memory(served_ring.SIZE) for _ in range(served_ring.SLOTS)], Memory(served_ring.SIZE)
    boss, _ = multiprocessing.Pipe()
    try:
        served_ring.consume(ipcsync.connect(endpoint, prefix="ring/"), ipcsync.Stream(), slots, mine, 1, boss)
    except ipcsync.RecorderLost:
        return "lost"
    return "done"


@pytest.mark.driver
@pytest.mark.parametrize("engine", ["event", "timeline"])
def test_a_rings_consumer_does_not_stand_still_behind_a_dead_producer(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, new_peer: Callable[..., Peer], engine: str
) -> None:
    producer, consumer = (new_peer(IPCSYNC_ENGINE=engine) for _ in range(2))
    producer.call(_hold, coordinator.endpoint)
    consumer.begin(_consume, coordinator.endpoint)
    until(lambda: any(row.name == "ring/read" and row.generation for row in client.list_events()), "it waits")
    producer.kill()
    assert consumer.result() == "lost"


_long = pytest.mark.thorough  # it takes as long as the recipe waits for anything at all


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("async_server", 0),
        ("served_ring", 0),
        pytest.param("served_ring", 1, marks=_long),
        pytest.param("survive_restart", 0, marks=_long),
    ],
)
def test_a_recipe_ends_with_all_its_processes_if_one_is_killed(name: str, number: int) -> None:
    """Those of the others are killed amid their work above."""
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.docs.recipe_bereaved", str(_RECIPES / f"{name}.py"), str(number)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = program.communicate(timeout=_DEADLINE_S)
        assert "killed: " in said
        until(lambda: not _is_any_left(program.pid), "all its processes have ended")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait(_DEADLINE_S)


def _is_any_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_step_is_done_again_if_its_peer_had_not_noticed_the_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(_RECIPES))
    survive, stream = importlib.import_module("survive_restart").survive, ipcsync.Stream()
    with ipcsync.launch(runtime_dir=str(tmp_path), log_level="error") as coordinator:
        monkeypatch.setenv("IPCSYNC_ENDPOINT", coordinator.endpoint)
        answers = [bytes(ipcsync.default_client().record(stream))]

    def step(client: ipcsync.Client) -> bytes:
        answers.append(bytes(client.record(stream)))
        client.point(answers.pop(0)).synchronize(30)
        return client.epoch

    with ipcsync.launch(runtime_dir=str(tmp_path), log_level="error"):
        assert survive(step) == ipcsync.default_client().epoch
        ipcsync.default_client().close()
    assert len(answers) == 1
