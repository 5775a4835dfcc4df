"""The command line's manners: help that teaches, exit statuses, plain text where no terminal reads, a quick start."""

from __future__ import annotations

import importlib
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from rich.cells import cell_len

import ipcsync
from ipcsync._board import runtime_dir
from ipcsync.cli import COMMANDS, PROGRAMS, main
from ipcsync.cli.output import Failed, WrongCall, fitted
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until
from tests.kit.zygote import EXEC, IPCSYNC

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_EXAMPLE = re.compile(r"^ {2,}((?:[A-Z_]+=\S+ )*)ipcsync ?(.*?)(?: {2,}.*)?$", re.MULTILINE)


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`ipcsync arguments…` in a process of its own."""
    command = [*IPCSYNC, *arguments]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)


def run_on_terminal(*arguments: str, **env: str) -> str:
    """What `ipcsync arguments…` writes to a terminal."""
    ours, theirs = pty.openpty()
    command = [*IPCSYNC, *arguments]
    settings = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        command, env={**settings, "TERM": "xterm-256color", **env}, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = b"".join(_until_end(ours))
    os.close(ours)
    assert process.wait(60) == 0, written.decode()
    return written.decode()


def _until_end(fd: int) -> Iterator[bytes]:
    while True:
        try:
            data = os.read(fd, 4096)
        except OSError:  # EIO: the last one has closed the terminal
            return
        if not data:
            return
        yield data


def _command(name: str) -> click.Command:
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_help_names_every_command_and_shows_examples() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", done.stdout, re.MULTILINE), name
    assert "Examples:" in done.stdout


@pytest.mark.process
def test_without_a_command_it_shows_the_help_and_calls_that_wrong() -> None:
    done = run()
    assert done.returncode == 2
    assert "Examples:" in done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "coordinator"])
def test_each_commands_help_shows_examples(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0
    assert f"  ipcsync {name}" in done.stdout


@pytest.mark.process
def test_coordinator_help_is_the_daemons_own() -> None:
    done = run("coordinator", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: ipcsync coordinator")
    assert "--lease-ttl" in done.stdout


@pytest.mark.process
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_example_in_the_help_parses(name: str) -> None:
    text = run(*name.split(), "--help").stdout
    examples = [match[2] for match in _EXAMPLE.finditer(text)]
    assert examples
    for example in examples:
        called, *arguments = shlex.split(re.split(r" [>|] ", example)[0])  # what the shell does with it is not ours
        assert called in COMMANDS, example
        command = _command(called)
        if called in PROGRAMS:
            program = f"ipcsync_{called}" if called == "demo" else f"ipcsync_{called}.__main__"
            command = importlib.import_module(program).main
        if "--help" not in arguments:
            command.make_context(called, arguments)  # raises what a user would see


@pytest.mark.process
def test_help_loads_neither_zmq_nor_cuda_nor_rich() -> None:
    code = (
        "import sys\nfrom ipcsync.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        # `cuda` itself may be there: older cuda-bindings load it in every process, by a .pth file.
        "names = ('zmq', 'cuda.bindings', 'rich', 'msgspec', 'ipcsync_coordinator')\n"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.process
def test_importing_the_command_line_loads_no_command() -> None:
    code = "import sys, ipcsync.cli; print(sorted(name for name in sys.modules if name.startswith('ipcsync.cli')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['ipcsync.cli', 'ipcsync.cli.output']"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_is_there(name: str) -> None:
    assert isinstance(_command(name), click.Command)


@pytest.mark.process
def test_version_is_the_packages() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.strip() == f"ipcsync, version {version('ipcsync')}"


# --- exit statuses ----------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments",
    [
        ("nosuch",),
        ("--nosuch",),
        ("status", "--nosuch"),
        ("status", "extra"),
        ("demo", "--workers", "0"),
        ("demo", "--workers", "17"),
        ("demo", "--workers", "many"),
        ("demo", "--engine", "steam"),
        ("coordinator", "--nosuch"),
        ("coordinator", "--lease-ttl", "-1"),
    ],
)
def test_a_wrong_call_exits_2_and_says_so_on_stderr(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Error" in done.stderr


@pytest.mark.process
def test_a_driver_that_does_not_exist_is_a_wrong_call() -> None:
    assert run("trace", "--help", IPCSYNC_DRIVER="").returncode == 0
    done = run("status", IPCSYNC_DRIVER="vulkan")
    assert done.returncode == 2
    assert "IPCSYNC_DRIVER" in done.stderr


# --- status -----------------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_status_without_a_coordinator_exits_1_with_one_line(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run("status", *arguments, IPCSYNC_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()  # its end depends on whether one serves elsewhere
    assert line.startswith(f"ipcsync: no coordinator at ipc://{tmp_path}/coordinator.sock: there is no socket")


_LOOKING = [("status",), ("top", "--once"), ("nodes",), ("doctor",), ("observer", "--port", "0")]


@pytest.mark.process
@pytest.mark.parametrize("command", _LOOKING, ids=" ".join)
def test_something_that_is_no_endpoint_is_a_wrong_call_of_one_line(command: tuple[str, ...]) -> None:
    for done in (run(*command, "--endpoint", "foo"), run(*command, IPCSYNC_ENDPOINT="tcp://localhost:1")):
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("ipcsync: an endpoint looks like ipc:///")
        assert len(done.stderr.splitlines()) == 1


def test_status_shows_sessions_and_events(
    coordinator: ipcsync.Coordinator, new_client: Callable[..., ipcsync.Client]
) -> None:
    event = new_client("decoder").event("kv/1", recorder=True)
    event.record(ipcsync.Stream()).synchronize(10)
    done = run("status", "--endpoint", coordinator.endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert coordinator.endpoint in done.stdout
    assert re.search(rf"^decoder +{os.getpid()} +1 ", done.stdout, re.MULTILINE)
    assert re.search(r"^kv/1 +(event|timeline) +open +1 +[01] +1 +decoder ", done.stdout, re.MULTILINE)
    assert "ipcsync status" not in done.stdout, "it shows itself"


@pytest.mark.parametrize("command", [("status",), ("top", "--once"), ("doctor",)], ids=" ".join)
def test_a_coordinator_is_found_by_its_directory(coordinator: ipcsync.Coordinator, command: tuple[str, ...]) -> None:
    done = run(*command, "--runtime-dir", coordinator.runtime_dir, IPCSYNC_ENDPOINT="ipc:///nowhere")
    assert (done.returncode, done.stderr) == (0, "")
    assert "none at" not in done.stdout, "the doctor started one of its own"


def test_status_as_json_can_be_read_by_a_program(
    coordinator: ipcsync.Coordinator, new_client: Callable[..., ipcsync.Client]
) -> None:
    client = new_client("decoder")
    client.event("kv/1", recorder=True)
    done = run("status", "--json", IPCSYNC_ENDPOINT=coordinator.endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["endpoint"] == coordinator.endpoint
    assert found["epoch"] == client.epoch.hex()
    assert [row["name"] for row in found["sessions"]] == ["decoder"]
    assert [(row["name"], row["state"]) for row in found["events"]] == [("kv/1", "open")]
    assert found["stats"]["events"] == 1


def test_status_says_how_often_the_coordinator_was_started_and_why(
    new_coordinator: Callable[..., ipcsync.Coordinator],
) -> None:
    one = new_coordinator(keeper=True)
    with ipcsync.connect(one.endpoint) as client:
        os.kill(client.stats()["pid"], signal.SIGKILL)
        assert client.stats(timeout=DEADLINE_S)["starts"] == 2
        done = run("status", "--endpoint", one.endpoint)
    assert done.returncode == 0
    assert re.search(r"2 \(1 died\); the last \d+ s ago, after \d+ ms", done.stdout)
    assert re.search(rf"pid \d+, \d+ MB; keeper {one.pid}, \d+ MB", done.stdout)


@pytest.mark.process
def test_a_runtime_directory_that_is_too_long_for_a_socket_is_one_line(tmp_path: Path) -> None:
    for command in _LOOKING:
        done = run(*command, IPCSYNC_RUNTIME_DIR=str(tmp_path / ("long" * 30)), IPCSYNC_ENDPOINT="")
        assert (done.returncode, done.stdout) == (2, ""), command
        assert "choose another runtime directory" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_status_of_an_idle_coordinator_says_that_there_is_nothing(coordinator: ipcsync.Coordinator) -> None:
    done = run("status", "--endpoint", coordinator.endpoint)
    assert done.returncode == 0
    assert "no sessions" in done.stdout
    assert "no events" in done.stdout


# --- where it is written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("status",), ("status", "--json"), ("top", "--once"), ("doctor",)])
def test_an_output_that_is_full_is_one_line_and_status_1(
    coordinator: ipcsync.Coordinator, arguments: tuple[str, ...]
) -> None:
    environment = {**os.environ, "IPCSYNC_ENDPOINT": coordinator.endpoint}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*IPCSYNC, *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ipcsync: cannot write the output: No space left on device"
    assert "Traceback" not in done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments", [("--version",), *((*name.split(), "--help") for name in ("", "doctor --fleet", *COMMANDS))]
)
def test_so_it_is_while_the_arguments_are_read(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*IPCSYNC, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "ipcsync: cannot write the output: No space left on device\n")


@pytest.mark.process
@pytest.mark.parametrize("arguments", [("--help",), ("coordinator", "--help")])
def test_a_help_that_goes_nowhere_is_no_failure(arguments: tuple[str, ...]) -> None:
    command = " ".join(map(shlex.quote, [*IPCSYNC, *arguments]))
    done = subprocess.run(["sh", "-c", f"{command} >&- <&-"], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.program
@pytest.mark.process
@pytest.mark.parametrize(
    "arguments",
    [("status",), pytest.param(("doctor", "--json"), marks=pytest.mark.thorough), ("demo", "--workers", "1")],
)
def test_an_output_that_is_closed_is_one_to_nowhere(
    coordinator: ipcsync.Coordinator, arguments: tuple[str, ...]
) -> None:
    command = " ".join(map(shlex.quote, [*IPCSYNC, *arguments]))
    done = subprocess.run(
        ["sh", "-c", f"{command} >&- <&-"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "IPCSYNC_ENDPOINT": coordinator.endpoint},
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_a_merged_trace_that_cannot_be_written_is_one_line_and_status_2(
    coordinator: ipcsync.Coordinator, tmp_path: Path
) -> None:
    with ipcsync.connect(coordinator.endpoint, trace=tmp_path) as client:
        client.record().synchronize()
    with open("/dev/full", "w") as full:
        command = [*IPCSYNC, "trace", "merge", str(tmp_path), "-o", "-"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "ipcsync: cannot write -: No space left on device\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("coordinator", "--help"),
        ("status",),
        ("status", "--json"),
        ("top", "--json"),
        pytest.param(("doctor",), marks=pytest.mark.thorough),
        ("trace", "merge", "{traces}", "-o", "-"),
        ("trace", "merge", "{traces}", "-o", "/dev/stdout"),
    ],
    ids=" ".join,
)
def test_a_reader_that_goes_away_ends_a_command_quietly_with_status_1(
    coordinator: ipcsync.Coordinator, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    if "merge" in arguments:
        with ipcsync.connect(coordinator.endpoint, trace=tmp_path) as client:
            client.record().synchronize()
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        done = subprocess.run(
            [*IPCSYNC, *(argument.format(traces=tmp_path) for argument in arguments)],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **EXEC, "IPCSYNC_ENDPOINT": coordinator.endpoint},
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_what_turns_a_line_round_or_moves_the_cursor_does_not_reach_the_terminal(
    coordinator: ipcsync.Coordinator, new_client: Callable[..., ipcsync.Client]
) -> None:
    name = "kv/\u202egnp.exe\u2066\u200b\u2028"
    new_client("evil\u202e").event(name, recorder=True)
    shown = r"kv/\u202egnp.exe\u2066\u200b\u2028"
    for arguments in (("status",), ("top", "--once")):
        told = run(*arguments, "--endpoint", coordinator.endpoint)
        for text in (told.stdout, run_on_terminal(*arguments, "--endpoint", coordinator.endpoint, COLUMNS="200")):
            assert shown in text
            assert r"evil\u202e" in text
            assert not set(text) & set("\u202e\u2066\u200b\u2028")
    failed = run("status", "--endpoint", "ipc:///tmp/\u202etxt.exe")
    assert r"ipc:///tmp/\u202etxt.exe" in failed.stderr


@pytest.mark.parametrize("arguments", [("status",), ("top", "--once")])
def test_what_the_encoding_of_stdout_has_not_is_escaped(
    coordinator: ipcsync.Coordinator, new_client: Callable[..., ipcsync.Client], arguments: tuple[str, ...]
) -> None:
    new_client("\u6e90").event("kv/\xe9\u6e90", recorder=True)
    command = [*IPCSYNC, *arguments, "--endpoint", coordinator.endpoint]
    env = {**os.environ, **EXEC, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, env=env, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert b"kv/\xe9\\u6e90" in done.stdout


def test_an_unnamed_event_is_called_by_its_recorder(
    coordinator: ipcsync.Coordinator, new_client: Callable[..., ipcsync.Client]
) -> None:
    new_client("decoder").record(ipcsync.Stream()).synchronize(10)
    for command in (("status",), ("top", "--once")):
        assert "(unnamed, of decoder)" in run(*command, "--endpoint", coordinator.endpoint).stdout


_LONG = "kv/prefill-0/decode-17/layer/" + "x" * 180 + "/the end"


def _die(endpoint: str, name: str) -> None:
    """In a peer: record on an event."""
    _kept.append(ipcsync.connect(endpoint, name="dies").event(name, recorder=True))


_kept: list[object] = []


@pytest.mark.parametrize("columns", [80, 120, 200])
@pytest.mark.parametrize("command", ["status", "top"])
def test_whatever_the_names_state_engine_rate_and_recorder_are_to_be_seen(
    coordinator: ipcsync.Coordinator,
    new_client: Callable[..., ipcsync.Client],
    columns: int,
    command: str,
) -> None:
    recorder = new_client("recorder-" + "y" * 60)
    recorder.event(_LONG, recorder=True)
    recorder.event("\u4e16" * 60, recorder=True)  # of two columns each
    arguments = (command, *(["--once"] if command == "top" else []), "--endpoint", coordinator.endpoint)
    text = _ESCAPE.sub("", run_on_terminal(*arguments, COLUMNS=str(columns)))
    lines = [line.rstrip() for line in text.splitlines()]
    start = next(number for number, line in enumerate(lines) if line.split()[:1] == ["event"])
    assert max(cell_len(line) for line in lines[start:]) <= columns
    head = lines[start]
    for name in ("state", "engine", "recorder", *(["/s"] if command == "top" else [])):
        assert f" {name}" in head
    rows = [line for line in lines[start:] if " open " in line]
    assert len(rows) == 2
    for row in rows:
        assert re.search(r"… *\S.* (event|timeline) .* recor\S*y( |$)", row), row
    assert re.search(r"^ *kv/.*…\S*(the )?end ", rows[0]), "both ends of a name are kept"


def test_elsewhere_than_on_a_terminal_names_are_whole(
    coordinator: ipcsync.Coordinator, new_client: Callable[..., ipcsync.Client]
) -> None:
    new_client("recorder").event(_LONG, recorder=True)
    assert _LONG in run("status", "--endpoint", coordinator.endpoint).stdout


@pytest.mark.own_coordinator  # its slots' numbers are shown
def test_two_events_of_one_name_are_told_apart_and_the_broken_one_says_why_and_when(
    coordinator: ipcsync.Coordinator, new_client: Callable[..., ipcsync.Client], peer: Peer
) -> None:
    client = new_client("stays")
    peer.call(_die, coordinator.endpoint, "weights")
    held = client.event("weights")
    peer.kill()
    until(lambda: held.state == "broken", "its recorder's death is seen")
    client.event("weights", recorder=True)
    shown = run("status", "--endpoint", coordinator.endpoint).stdout
    assert re.search(r"^weights \(slot 0\) +\w+ +broken .* dies +died \d+ s ago ", shown, re.MULTILINE)
    assert re.search(r"^weights \(slot 1\) +\w+ +open .* stays +- ", shown, re.MULTILINE)
    rows = json.loads(run("status", "--json", "--endpoint", coordinator.endpoint).stdout)["events"]
    assert [(row["cause"], row["ended_s"] is None) for row in rows] == [("died", False), ("", True)]


@pytest.mark.parametrize(
    ("width", "kept", "row"),
    [
        (40, ["event", "n", "device"], ["name-of-an-event", "1", "extra"]),
        (27, ["event", "n", "device"], ["name-of-an-event", "1", "extra"]),
        (26, ["event", "n"], ["name-of-an-event", "1"]),
        (17, ["event", "n"], ["name-o…n-event", "1"]),
        (3, ["event", "n"], ["nam…vent", "1"]),
    ],
)
def test_columns_are_left_out_first_and_then_names_are_shortened(width: int, kept: list[str], row: list[str]) -> None:
    found, rows = fitted(("event", "n", "device"), [["name-of-an-event", "1", "extra"]], width)
    assert (found, rows) == (kept, [row])


@pytest.mark.parametrize("text", ["\u65e5", "e\u0301", "\u2764\ufe0fa"])
def test_a_shortened_name_has_its_room_whatever_its_characters_take(text: str) -> None:
    for width in range(8, 40):
        _, ((name,),) = fitted(("event",), [[40 * text]], width)
        assert cell_len(name) <= width


# --- colours ----------------------------------------------------------------------------------------------------------


def test_colours_and_lines_are_for_terminals(
    coordinator: ipcsync.Coordinator, new_client: Callable[..., ipcsync.Client]
) -> None:
    new_client("decoder [bold]kv[/bold]")
    arguments = ("status", "--endpoint", coordinator.endpoint)
    piped = run(*arguments).stdout
    assert piped.isascii()
    assert "\x1b" not in piped
    on_terminal = run_on_terminal(*arguments, COLUMNS="160")
    assert "\x1b[" in on_terminal
    assert "decoder [bold]kv[/bold]" in on_terminal, "a name was taken for markup"
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", run_on_terminal(*arguments, NO_COLOR="1", COLUMNS="160"))
    assert "\x1b" not in run_on_terminal(*arguments, TERM="dumb")


@pytest.mark.program
@pytest.mark.process
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no -P")
@pytest.mark.parametrize("arguments", [("coordinator", "--help"), ("demo", "--workers", "1")])
def test_what_a_command_executes_imports_nothing_from_the_working_directory(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    for module in ("click", "queue", "msgspec", "ipcsync_coordinator"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('imported from the working directory')")
    done = subprocess.run(
        [sys.executable, "-P", *IPCSYNC[1:], *arguments],
        cwd=tmp_path,
        env={**os.environ, **EXEC},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [("status", "--runtime-dir", "run"), ("status",), ("reload",)], ids=" ".join)
def test_a_runtime_directory_below_one_that_was_removed_is_told(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("IPCSYNC_ENDPOINT", raising=False)
    monkeypatch.setenv("IPCSYNC_RUNTIME_DIR", "run")
    here.rmdir()
    with pytest.raises((WrongCall, ipcsync.ConnectError), match=r"^run is relative to a directory that was removed$"):
        _command(command[0]).main([*command[1:]], standalone_mode=False)


def test_a_reload_says_whose_coordinators_it_sees(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=rf"no coordinator that uid {os.getuid()} can see serves {tmp_path}$"):
        _command("reload").main(["--runtime-dir", str(tmp_path)], standalone_mode=False)


def test_a_reload_from_another_pid_namespace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = runtime_dir.Serving(os.getpid(), runtime_dir.KEEPER, 1)
    monkeypatch.setattr(runtime_dir, "who_serves", lambda _: serving)
    with pytest.raises(Failed, match="in another pid namespace"):
        _command("reload").main([], standalone_mode=False)


@pytest.mark.process
def test_a_reload_of_a_coordinator_that_has_just_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr(runtime_dir, "who_serves", lambda _: runtime_dir.Serving(ended.pid, runtime_dir.KEEPER, 0))
    with pytest.raises(Failed, match=r"^the coordinator has just ended$"):
        _command("reload").main([], standalone_mode=False)
