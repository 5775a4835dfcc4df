"""The Containerfile and the compose files: their rules, what they copy and call, and the example worker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

import ipcsync
from tests.unit.deploy.deploying import (
    DEADLINE_S,
    DEPLOY,
    ROOT,
    UID,
    documents,
    module,
    parse,
    run,
)

_CONTAINERFILE = DEPLOY / "container" / "Containerfile"


def _instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", _CONTAINERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def test_the_containerfile_keeps_the_rules() -> None:
    instructions = _instructions()
    known = {"FROM", "WORKDIR", "COPY", "RUN", "LABEL", "ENV", "USER", "EXPOSE", "STOPSIGNAL"}
    known |= {"HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions} <= known
    for image in (value.split()[0] for name, value in instructions if name == "FROM"):
        name, _, tag = image.partition(":")
        assert "/" not in name, f"{image}: names a registry"
        assert tag not in ("", "latest"), f"{image}: is not pinned"
    names = [name for name, _ in instructions]
    last = dict(instructions)
    assert last["USER"] == f"{UID}:{UID}"
    assert names.index("USER") < names.index("ENTRYPOINT"), "it would run as root"
    assert "RUN" not in names[names.index("USER") :]
    for name in ("ENTRYPOINT", "CMD"):
        assert last[name].startswith("["), f"{name} must not go through a shell"
    assert names.count("HEALTHCHECK") == names.count("ENTRYPOINT") == names.count("CMD") == 1
    for step in (value for name, value in instructions if name == "RUN" and "pip install" in value):
        assert "--no-cache-dir" in step


def test_the_containerfile_copies_what_the_build_needs() -> None:
    copied = {word for name, value in _instructions() if name == "COPY" for word in value.split()[:-1]}
    project = (ROOT / "pyproject.toml").read_text()
    needed = {"pyproject.toml", "ipcsync", "services", "hatch_build.py"}
    needed |= set(re.findall(r'^(?:readme = "|license-files = \[")([^"]+)"', project, re.MULTILINE))
    assert len(needed) == 6
    assert needed <= copied


def test_the_containerfile_copies_what_there_is_and_calls_what_there_is() -> None:
    ignore = _CONTAINERFILE.with_name("Containerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    for name, value in _instructions():
        if name == "COPY" and not value.startswith("--from"):
            for source in value.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source in allowed, f"{source} is left out by the ignore file"
        if name == "HEALTHCHECK":
            program, *words = documents(value[value.index("[") :])[0]
            assert program == "ipcsync"
            parse(words)
        if name == "CMD":
            parse(documents(value)[0])


@pytest.mark.process
def test_the_compose_files_meet_the_specification() -> None:
    module("check_jsonschema")
    files = sorted((DEPLOY / "container").glob("compose*.yaml"))
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *files)
    docker = shutil.which("docker")
    if docker and not subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        for overlays in (files[-1:], [files[-1], *files[:-1]]):
            run(docker, "compose", *(word for file in overlays for word in ("-f", str(file))), "config", "--quiet")


def test_the_compose_services_share_what_they_must() -> None:
    compose, gpus = (
        documents((DEPLOY / "container" / name).read_text())[0] for name in ("compose.yaml", "compose.gpu.yaml")
    )
    services = compose["services"]
    assert services.keys() == gpus["services"].keys() == {"coordinator", "observer", "recorder", "waiter"}
    assert services["coordinator"]["ipc"] == "shareable"
    for name, service in services.items():
        assert service["user"] == f"{UID}:{UID}"
        assert service["volumes"] == ["runtime:/run/ipcsync"]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        if name != "coordinator":
            assert (service["ipc"], service["pid"]) == ("service:coordinator", "service:coordinator")
        if "entrypoint" in service:
            assert service["entrypoint"][:2] == ["python", "/opt/ipcsync/share/worker.py"]
        else:
            parse(service["command"])
    assert compose["volumes"]["runtime"]["driver_opts"]["o"].endswith(f"mode=0700,uid={UID},gid={UID}")
    assert all(port.startswith("127.0.0.1:") for port in services["observer"]["ports"])


def test_the_example_worker_hands_records_over(coordinator: ipcsync.Coordinator) -> None:
    command = [sys.executable, str(DEPLOY / "container" / "worker.py")]
    env = {**os.environ, "IPCSYNC_ENDPOINT": coordinator.endpoint}
    workers = [
        subprocess.Popen([*command, role, "2"], env=env, stdout=subprocess.PIPE, text=True)
        for role in ("wait", "record")
    ]
    try:
        said = [worker.communicate(timeout=DEADLINE_S)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0]
    for role, text in zip(("wait", "record"), said, strict=True):
        assert re.findall(rf"^{role} example/tick #(\d)", text, re.MULTILINE) == ["1", "2"]
