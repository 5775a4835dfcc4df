"""What the pages say is true: links, commands, settings, names, and the programs in them."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import ipcsync
from ipcsync import cli, errors
from ipcsync_bench.__main__ import main as bench_command
from ipcsync_coordinator.__main__ import main as coordinator_command
from ipcsync_demo import main as demo_command
from ipcsync_keeper import config
from ipcsync_observer.__main__ import main as observer_command
from tests.models import board_world, chain_world, link_model, restart_world

_ROOT = Path(__file__).parents[2]
_TOP = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
_PAGES = [*(_ROOT / name for name in _TOP), *sorted((_ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_BY_EXEC = {  # these parse what comes after the name
    "bench": bench_command,
    "coordinator": coordinator_command,
    "demo": demo_command,
    "observer": observer_command,
}
_DEADLINE_S = 60.0

pages = pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))


def _blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in _BLOCK.findall(page.read_text()) if name == language]


def _prose(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(_ROOT), f"{link} leads out of the repository"
        assert target.is_file(), f"{link} leads nowhere"
        assert not anchor or anchor in _anchors(target), f"{link}: there is no such heading"


def test_every_path_below_tests_that_is_named_anywhere_is_there() -> None:
    named = [
        "Makefile",
        "pyproject.toml",
        "tests/mutation/__main__.py",
        "tests/gpu/run.py",
        "tests/packaging/matrix.py",
    ]
    missing = [
        f"{page.relative_to(_ROOT)}: {path}"
        for page in [*(_ROOT / name for name in named), *_PAGES, *(_ROOT / "tests").rglob("README.md")]
        for path in re.findall(r"(?<![\w/.-])tests/[\w/]+(?:\.\w+)?", page.read_text())
        if not (_ROOT / path).exists()
    ]
    assert missing == []


@pages
def test_nothing_is_fetched_from_elsewhere(page: Path) -> None:
    assert not re.search(r"https?://|<script|<img", page.read_text())


def _commands(page: Path) -> Iterator[list[str]]:
    """Every `ipcsync …` in a shell block or in inline code, without the variables before it."""
    lines = [line for block in _blocks(page, "sh") for line in block.splitlines()]
    for line in lines + _CODE.findall(_prose(page)):
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        if words and words[0] == "ipcsync":
            yield words[1:]


def _why_not(words: list[str]) -> str | None:
    """What the command line has against it, without running it."""
    if not words:
        return None
    name, *rest = words
    with click.Context(cli.main) as context:
        if words in [[option] for parameter in cli.main.get_params(context) for option in parameter.opts]:
            return None
        command = _BY_EXEC.get(name) or cli.main.get_command(context, name)
        if command is None:
            return "there is no such command"
        try:
            command.make_context(name, rest, parent=context)
        except click.UsageError as error:
            return error.format_message()
    return None


@pages
def test_commands_are_ones_that_there_are(page: Path) -> None:
    for words in _commands(page):
        assert _why_not(words) is None, f"ipcsync {' '.join(words)}"


def test_every_command_is_told_of() -> None:
    text = (_ROOT / "docs" / "cli.md").read_text()
    assert [name for name in cli.COMMANDS if f"## ipcsync {name}\n" not in text] == []


def test_every_setting_of_the_coordinator_is_told_with_its_default() -> None:
    text = (_ROOT / "docs" / "cli.md").read_text()
    rows = [_row(name) for name in config.FIELDS]
    assert [row for row in rows if row not in text] == []
    assert len(re.findall(r"^\| `--", text, re.MULTILINE)) == len(rows)


def _row(name: str) -> str:
    default = config.FIELDS[name].default
    shown = (
        {True: "on", False: "off"}[default]
        if isinstance(default, bool)
        else f"{default:g}"
        if isinstance(default, float)
        else str(default)
    )
    return (
        f"| `--{name.replace('_', '-')}` | {f'`{shown}`' if shown else ''} | {config.FIELDS[name].metadata['help']} |"
    )


@pages
def test_python_in_it_compiles(page: Path) -> None:
    for block in _blocks(page, "python"):
        compile(block, page.name, "exec")


def test_every_public_name_is_in_the_reference() -> None:
    text = (_ROOT / "docs" / "api.md").read_text()
    told = set(re.findall(r"^::: ipcsync\.(\w+)$", text, re.MULTILINE))
    assert set(ipcsync.__all__) - told == set()
    assert "\n::: ipcsync.testing.StreamGate\n" in text


def test_every_error_is_told_of() -> None:
    text = (_ROOT / "docs" / "errors.md").read_text()
    assert [name for name in errors.__all__ if f"`{name}`" not in text] == []
    told = re.findall(r"^### `(\w+)`\n\n[^#]+\n\n\*Do:\* ", text, re.MULTILINE)
    assert sorted([*told, "IpcSyncError"]) == sorted(errors.__all__)


_MODELS = {"board": board_world, "chain": chain_world, "restart": restart_world, "link": link_model}


def test_every_mistake_that_a_design_page_names_is_planted_in_its_model() -> None:
    pages = [page.read_text() for page in (_ROOT / "docs" / "design").glob("*.md")]
    told = [line for text in pages for line in re.findall(r"^Planted in the (\w+) model: (.*)\.$", text, re.MULTILINE)]
    named = [(model, mistake) for model, line in told for mistake in re.findall(r"\*([^*]+)\*", line)]
    assert {model for model, _ in named} == set(_MODELS)
    assert [(model, mistake) for model, mistake in named if mistake not in _MODELS[model].MISTAKES] == []


def test_every_recipe_is_told_of() -> None:
    text = (_ROOT / "docs" / "recipes.md").read_text()
    recipes = [path.name for path in (_ROOT / "services" / "recipes").glob("*.py")]
    assert [name for name in recipes if f"(../services/recipes/{name})" not in text] == []


@pytest.fixture
def start(coordinator: ipcsync.Coordinator, tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts the text of a program, with the endpoint of the test's coordinator; none outlives the test."""
    env = {**os.environ, "IPCSYNC_ENDPOINT": coordinator.endpoint, "PYTHONWARNINGS": "error"}
    with contextlib.ExitStack() as ends:

        def run(text: str) -> subprocess.Popen[str]:
            path = tmp_path / f"program_{len(list(tmp_path.iterdir()))}.py"
            path.write_text(text)
            command = [sys.executable, str(path)]
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            ends.enter_context(process)
            ends.callback(process.kill)
            return process

        yield run


def _output(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize("first", ["producer", "consumer"])
def test_the_readmes_programs_run_in_either_order(
    client: ipcsync.Client, start: Callable[[str], subprocess.Popen[str]], first: str
) -> None:
    _short, producer, consumer = _blocks(_ROOT / "README.md", "python")
    notices = client.watch("kv/", timeout=_DEADLINE_S)
    processes = {first: start(producer if first == "producer" else consumer)}
    opened: set[str] = set()
    while opened != {"kv/ready", "kv/read"}:  # the first has come as far as it can alone
        notice = next(notices)
        if notice.kind == "opened":
            opened.add(notice.name)
    second = "consumer" if first == "producer" else "producer"
    processes[second] = start(producer if second == "producer" else consumer)
    assert _output(processes["producer"]) == "handed over\n"
    assert _output(processes["consumer"]) == "read\n"


def test_the_readmes_short_program_prints_what_stands_below_it(start: Callable[[str], subprocess.Popen[str]]) -> None:
    program, *_ = _blocks(_ROOT / "README.md", "python")
    _, _, below = (_ROOT / "README.md").read_text().partition(program)
    assert _output(start(program)) == below.split("```\n")[2]


def test_the_readmes_error_is_that_of_a_killed_recorder(
    client: ipcsync.Client, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    dying = start(_DYING)
    with client.event("kv/ready") as event, pytest.raises(ipcsync.RecorderLost) as lost:
        event.at(1).synchronize(timeout=_DEADLINE_S)
    dying.wait(_DEADLINE_S)
    told = f"RecorderLost: {lost.value}".replace(f"pid {dying.pid}", "pid 12983")
    assert told in " ".join((_ROOT / "README.md").read_text().split())


_DYING = """\
import os, signal
import ipcsync
from ipcsync.testing import StreamGate

client = ipcsync.connect(name="prefill")
event = client.event("kv/ready", recorder=True)
stream = ipcsync.Stream()
with StreamGate(stream):
    event.record(stream)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["call", "death", "order"])
@pytest.mark.process
def test_a_contributors_first_tests_pass(request: pytest.FixtureRequest, kind: str) -> None:
    (block,) = _blocks(_ROOT / "CONTRIBUTING.md", "python")
    (name,) = re.findall(rf"^def (test_\w+)\(.*\):  # an? {kind}\b", block, re.MULTILINE)
    scope: dict[str, Any] = {}
    exec(block, scope)
    test = scope[name]
    test(**{fixture: request.getfixturevalue(fixture) for fixture in inspect.signature(test).parameters})


_PROGRAMS = {
    "getting-started.md": ["written, read\n", "weights 1 open\n"],
    "async.md": ["generation 1\n"],
    "concepts.md": ["24\n"],
    "errors.md": ["lost: RecorderLost died\ntaken: False\n"],
}


@pytest.mark.program
@pytest.mark.parametrize("page", _PROGRAMS)
def test_the_programs_of_a_page_run(start: Callable[[str], subprocess.Popen[str]], page: str) -> None:
    programs = [block for block in _blocks(_ROOT / "docs" / page, "python") if "import ipcsync" in block]
    outputs = [_output(start(program)) for program in programs]
    printed = ["".join(line for line in output.splitlines(True) if not line.startswith("time=")) for output in outputs]
    assert printed == _PROGRAMS[page]  # beside what their coordinators log


def test_getting_started_ends_if_its_worker_dies(start: Callable[[str], subprocess.Popen[str]]) -> None:
    program = _blocks(_ROOT / "docs" / "getting-started.md", "python")[0]
    assert program.count("        stream = ipcsync.Stream()\n") == 2
    dies = program.replace("        stream = ipcsync.Stream()\n", "        import os; os.kill(os.getpid(), 9)\n", 1)
    process = start(dies)
    output, _ = process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == 1
    assert "EOFError" in output or "ConnectionResetError" in output


@pytest.mark.program
@pytest.mark.parametrize("there", ["here.send(bytes", "client.point(here", "print("])
def test_getting_started_ends_if_its_own_process_raises(
    start: Callable[[str], subprocess.Popen[str]], there: str
) -> None:
    program = _blocks(_ROOT / "docs" / "getting-started.md", "python")[0]
    raises = program.replace(f"        {there}", f"        raise BrokenPipeError\n        {there}", 1)
    assert raises != program
    process = start(raises)
    output, _ = process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == 1
    assert "BrokenPipeError" in output


@pytest.mark.process
def test_the_plugins_examples_pass(tmp_path: Path) -> None:
    blocks = _blocks(_ROOT / "docs" / "pytest.md", "python")
    for number, block in enumerate(blocks):
        (tmp_path / f"test_example_{number}.py").write_text(block)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "ipcsync",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # there are many here, which take longer to import than the tests
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(blocks)} passed" in done.stdout
