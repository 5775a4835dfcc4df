"""The image of the Containerfile, run as compose.yaml says, by podman: `make test-deploy`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.until import until

_PREPARED = os.environ.get("IPCSYNC_DEPLOY")
if not _PREPARED:
    pytest.skip("make test-deploy makes the image that this runs", allow_module_level=True)
if os.geteuid() != 0 or shutil.which("podman") is None or shutil.which("runc") is None:
    pytest.skip("needs root, podman and runc", allow_module_level=True)

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

_COMPOSE = Path(__file__).parents[2] / "deploy" / "container" / "compose.yaml"
_UID = 10001
_COMMAND_S = 60.0
# No service manager and no cgroup manager need run where the tests do; limits stay as they are.
_PODMAN = "podman --runtime runc --cgroup-manager cgroupfs"
_HERE = "--network none --no-healthcheck --ulimit nofile=1024:1024 --ulimit nproc=1024:1024"
_ENVIRONMENT = {**os.environ, "CONTAINERS_STORAGE_CONF": f"{_PREPARED}/storage.conf"}


def _tried(command: str) -> subprocess.CompletedProcess[str]:
    words = shlex.split(f"{_PODMAN} {command}")
    return subprocess.run(
        words,
        env=_ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_COMMAND_S,
        check=False,
    )


def _podman(command: str) -> str:
    done = _tried(command)
    assert done.returncode == 0, f"{command}: {done.stdout}"
    return done.stdout


def _services() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (the group `deploy`)")
    services = yaml.safe_load(_COMPOSE.read_text())["services"]
    assert isinstance(services, dict)
    return services


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Path]:
    """The volume of compose.yaml: a tmpfs that belongs to the containers' user."""
    path = tmp_path / "runtime"
    path.mkdir()
    options = f"size=64m,mode=0700,uid={_UID},gid={_UID}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    yield path
    subprocess.run(["umount", str(path)], check=True)


Start = Callable[..., str]


@pytest.fixture
def start(runtime: Path) -> Iterator[Start]:
    """Starts a service of compose.yaml; `isolated` leaves it its own ipc and pid namespaces."""
    names: list[str] = []
    services = _services()

    def run(service: str, *, isolated: bool = False, **environment: str) -> str:
        settings = services[service]
        name = f"ipcsync-test-{service}"
        flags = [f"--name {name} --user {settings['user']} --volume {runtime}:/run/ipcsync"]
        flags += ["--read-only"] if settings["read_only"] else []
        flags += [f"--cap-drop {name}" for name in settings["cap_drop"]]
        flags += [f"--security-opt {option.partition(':')[0]}" for option in settings["security_opt"]]
        for space in ("ipc", "pid"):
            wanted = str(settings.get(space, ""))
            if wanted and not isolated:
                flags.append(f"--{space} {wanted.replace('service:', 'container:ipcsync-test-')}")
        flags += [f"--env {name}={value}" for name, value in environment.items()]
        words = list(settings.get("command", []))
        if "entrypoint" in settings:
            program, *words = settings["entrypoint"]
            flags.append(f"--entrypoint {program}")
        names.append(name)
        _podman(f"run --detach {_HERE} {' '.join(flags)} ipcsync:local {shlex.join(words)}")
        return name

    yield run
    for name in reversed(names):
        _tried(f"rm --force --time 2 {name}")


def _healthy(name: str) -> bool:
    """Whether the probe of its image succeeds in a container."""
    (image,) = json.loads(_podman("image inspect ipcsync:local"))
    kind, *words = image["Healthcheck"]["Test"]
    assert kind == "CMD"
    return _tried(f"exec {name} {shlex.join(words)}").returncode == 0


def _waits(name: str) -> list[str]:
    """The engines of the records that the waiter has waited for."""
    return re.findall(r"^wait example/tick #\d+ \((\w+) engine\)", _podman(f"logs {name}"), re.MULTILINE)


def test_the_services_of_the_compose_file_work_together(start: Start) -> None:
    coordinator = start("coordinator")
    until(lambda: _healthy(coordinator), "the coordinator's probe succeeds")
    observer, _, waiter = start("observer"), start("recorder"), start("waiter")
    until(lambda: len(_waits(waiter)) > 2, "records are handed over")
    assert "example/tick" in _podman(f"exec {coordinator} ipcsync status")
    _, *probe = _services()["observer"]["healthcheck"]["test"]
    until(lambda: _tried(f"exec {observer} {shlex.join(probe)}").returncode == 0, "the observer's probe succeeds")
    assert _podman(f"exec {waiter} id -u").strip() == str(_UID)
    assert _tried(f"exec {waiter} touch /opt/written").returncode != 0
    assert _tried(f"exec {waiter} ipcsync doctor").returncode == 0, _tried(f"exec {waiter} ipcsync doctor").stdout


def test_a_killed_worker_is_an_error_in_the_other_container(start: Start) -> None:
    coordinator = start("coordinator")
    until(lambda: _healthy(coordinator), "the coordinator's probe succeeds")
    recorder, waiter = start("recorder"), start("waiter")
    until(lambda: _waits(waiter), "records are handed over")
    _podman(f"kill --signal KILL {recorder}")
    _podman(f"wait {waiter}")
    assert "RecorderLost" in _podman(f"logs {waiter}")


def test_the_coordinators_end_is_an_error_in_every_container(start: Start) -> None:
    coordinator = start("coordinator")
    until(lambda: _healthy(coordinator), "the coordinator's probe succeeds")
    workers = [start(role, isolated=True) for role in ("recorder", "waiter")]
    until(lambda: _waits(workers[1]), "records are handed over")
    _podman(f"stop --time 10 {coordinator}")
    for worker in workers:
        _podman(f"wait {worker}")
        assert "CoordinatorLost" in _podman(f"logs {worker}")


def test_workers_that_share_only_the_runtime_directory_take_the_timeline(start: Start) -> None:
    coordinator = start("coordinator")
    until(lambda: _healthy(coordinator), "the coordinator's probe succeeds")
    recorder, waiter = start("recorder", isolated=True), start("waiter", isolated=True)
    until(lambda: len(_waits(waiter)) > 2, "records are handed over")
    assert set(_waits(waiter)) == {"timeline"}
    spaces = [
        _podman(f"exec {name} readlink /proc/self/ns/{space}")
        for name in (recorder, waiter)
        for space in ("ipc", "pid")
    ]
    assert len(set(spaces)) == 4
    _podman(f"kill --signal KILL {recorder}")
    _podman(f"wait {waiter}")
    assert "RecorderLost" in _podman(f"logs {waiter}")
