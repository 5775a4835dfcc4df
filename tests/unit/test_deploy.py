"""What lies in deploy/ is right: each file by the strictest tool at hand; each flag, path and metric in it exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

import ipcsync
from ipcsync import cli
from ipcsync_coordinator import config
from ipcsync_coordinator.__main__ import main as coordinator_command

_ROOT = Path(__file__).parents[2]
_DEPLOY = _ROOT / "deploy"
_UNITS = {"ipcsync@.service": "system", "ipcsync.service": "user"}
_OBSERVER = "ipcsync-observer@.service"
_BRIDGE_UNIT = "ipcsync-bridge@.service"
_BASE = _DEPLOY / "kubernetes" / "base"
_FLEET = _DEPLOY / "kubernetes" / "fleet"
_CONTAINERFILE = _DEPLOY / "container" / "Containerfile"
_ALERTS = _DEPLOY / "prometheus" / "alerts.yaml"
_READMES = sorted(_DEPLOY.glob("*/README.md"))
_INSTALLED = "/opt/ipcsync/bin"
_UID = 10001
_EXPOSURE = 20  # tenths
_BRIDGE_EXPOSURE = 30  # it speaks over the network
_DEADLINE_S = 60.0


def _run(*command: str | Path, **env: str) -> str:
    """What a tool prints, which must succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=_DEADLINE_S, env={**os.environ, **env}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def _module(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed (the group `deploy`)")


def _documents(text: str) -> list[Any]:
    return list(_module("yaml").safe_load_all(text))


def _parse(words: list[str]) -> None:
    """Raise click.UsageError for a call of `ipcsync words…` that is wrong, without running it."""
    from ipcsync_bridge.__main__ import main as bridge_command
    from ipcsync_observer.__main__ import main as observer_command

    name, *rest = words
    by_exec = {"bridge": bridge_command, "coordinator": coordinator_command, "observer": observer_command}
    with click.Context(cli.main) as context:
        command = by_exec.get(name) or cli.main.get_command(context, name)
        assert command is not None, f"ipcsync {name}: there is no such command"
        command.make_context(name, list(rest), parent=context)


# --- systemd ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=_UNITS)
def unit(request: pytest.FixtureRequest) -> Path:
    """Each unit."""
    return _DEPLOY / "systemd" / str(request.param)


@pytest.mark.process
def test_a_unit_is_what_systemd_takes(unit: Path, tmp_path: Path) -> None:
    analyze = _tool("systemd-analyze")
    command = tmp_path / "bin" / "ipcsync"  # the one that it names is not installed here
    command.parent.mkdir()
    command.touch(0o755)
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(_INSTALLED, str(command.parent)))
    (tmp_path / "run").mkdir(mode=0o700)
    manager = f"--{_UNITS[unit.name]}"
    said = _run(analyze, "verify", "--man=no", manager, copy, XDG_RUNTIME_DIR=str(tmp_path / "run"))
    assert copy.name.partition(".")[0] not in said, said


@pytest.mark.process
@pytest.mark.parametrize("name", ["ipcsync@.service", _OBSERVER])
def test_the_machines_units_are_hardened(name: str) -> None:
    analyze = _tool("systemd-analyze")
    _run(analyze, "security", "--offline=yes", f"--threshold={_EXPOSURE}", _DEPLOY / "systemd" / name)


def test_the_observers_unit_looks_at_the_coordinator_of_its_user() -> None:
    settings = _settings(_DEPLOY / "systemd" / _OBSERVER)
    (start,) = settings["ExecStart"]
    program, *words = start.split()
    assert program == f"{_INSTALLED}/ipcsync"
    _parse(words)
    directories = _settings(_DEPLOY / "systemd" / "ipcsync@.service")["RuntimeDirectory"]
    assert settings["Environment"] == [f"IPCSYNC_RUNTIME_DIR=/run/{directory}" for directory in directories]
    assert settings["Wants"] == settings["After"] == ["ipcsync@%i.service"]


@pytest.mark.process
def test_the_bridges_unit_is_hardened() -> None:
    analyze = _tool("systemd-analyze")
    _run(analyze, "security", "--offline=yes", f"--threshold={_BRIDGE_EXPOSURE}", _DEPLOY / "systemd" / _BRIDGE_UNIT)


@pytest.mark.process
def test_the_bridges_unit_is_what_systemd_takes(tmp_path: Path) -> None:
    analyze = _tool("systemd-analyze")
    command = tmp_path / "bin" / "ipcsync"
    command.parent.mkdir()
    command.touch(0o755)
    copy = tmp_path / _BRIDGE_UNIT
    copy.write_text((_DEPLOY / "systemd" / _BRIDGE_UNIT).read_text().replace(_INSTALLED, str(command.parent)))
    said = _run(analyze, "verify", "--man=no", "--system", copy)
    assert "ipcsync-bridge" not in said, said


def test_the_bridges_unit_starts_what_there_is_with_variables_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = _DEPLOY / "systemd" / _BRIDGE_UNIT
    settings = _settings(unit)
    for name in re.findall(r"IPCSYNC_BRIDGE_\w+", unit.read_text()):
        monkeypatch.setenv(name, "nats://127.0.0.1:4222" if name.endswith("SERVERS") else "a")
    (start,) = settings["ExecStart"]
    program, *words = start.split()
    assert program == f"{_INSTALLED}/ipcsync"
    _parse(words)
    assert settings["RestartPreventExitStatus"] == ["3"]


def test_the_configuration_of_nats_lets_each_node_speak_as_itself_only() -> None:
    text = (_DEPLOY / "nats" / "nats-server.conf").read_text()
    users = text.split("user: ")[1:]
    assert len(users) == 2
    for user in users:
        node = user.partition('"')[2].partition('"')[0].removeprefix("CN=")
        speaks = re.findall(r"ipcsync\.main\.\*\.(?:ask|tell)\.([\w-]+)", user)
        hears = re.findall(r'"ipcsync\.main\.([\w-]+)\.>", "_INBOX_([\w-]+)\.>"', user)
        keys = re.findall(r"\$KV\.ipcsync_main\.nodes\.([\w-]+)", user)
        assert {*speaks, *(each for pair in hears for each in pair), *keys} == {node}


def test_the_drop_in_is_for_a_systemd_that_reloads_by_a_signal(tmp_path: Path) -> None:
    settings = _settings(_DEPLOY / "systemd" / "notify-reload.conf")
    assert settings == {"Type": ["notify-reload"], "ExecReload": [""]}
    assert "SIGHUP" in (_DEPLOY / "systemd" / "README.md").read_text()


def _settings(unit: Path) -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        name, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            settings.setdefault(name, []).append(value)
    return settings


def test_a_unit_starts_a_command_that_there_is_in_the_directory_that_it_makes(unit: Path) -> None:
    settings = _settings(unit)
    (start,) = settings["ExecStart"]
    program, *words = start.split()
    assert program == f"{_INSTALLED}/ipcsync"
    _parse(words)
    (directory,) = settings["RuntimeDirectory"]
    assert words[words.index("--runtime-dir") + 1] in (f"/run/{directory}", f"%t/{directory}")
    assert settings["RuntimeDirectoryMode"] == ["0700"]
    (reload,) = settings["ExecReload"]
    assert reload.split()[0] == program
    _parse(reload.split()[1:])
    assert "--no-keeper" not in words
    assert "--spare" in words
    assert settings["Type"] == ["notify"]
    assert int(settings["WatchdogSec"][0]) > 1


@pytest.mark.parametrize(
    "name", ["PrivateIPC", "PrivateDevices", "PrivateUsers", "PrivateTmp", "MemoryDenyWriteExecute"]
)
def test_a_unit_keeps_what_cuda_and_the_workers_need(unit: Path, name: str) -> None:
    assert name not in _settings(unit)


# --- containers -------------------------------------------------------------------------------------------------------


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
    assert last["USER"] == f"{_UID}:{_UID}"
    assert names.index("USER") < names.index("ENTRYPOINT"), "it would run as root"
    assert "RUN" not in names[names.index("USER") :]
    for name in ("ENTRYPOINT", "CMD"):
        assert last[name].startswith("["), f"{name} must not go through a shell"
    assert names.count("HEALTHCHECK") == names.count("ENTRYPOINT") == names.count("CMD") == 1
    for run in (value for name, value in instructions if name == "RUN" and "pip install" in value):
        assert "--no-cache-dir" in run


def test_the_containerfile_copies_what_the_build_needs() -> None:
    copied = {word for name, value in _instructions() if name == "COPY" for word in value.split()[:-1]}
    project = (_ROOT / "pyproject.toml").read_text()
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
                assert (_ROOT / source).exists(), source
                assert source in allowed, f"{source} is left out by the ignore file"
        if name == "HEALTHCHECK":
            program, *words = _documents(value[value.index("[") :])[0]
            assert program == "ipcsync"
            _parse(words)
        if name == "CMD":
            _parse(_documents(value)[0])


@pytest.mark.process
def test_the_compose_files_meet_the_specification() -> None:
    _module("check_jsonschema")
    files = sorted((_DEPLOY / "container").glob("compose*.yaml"))
    _run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *files)
    docker = shutil.which("docker")
    if docker and not subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        for overlays in (files[-1:], [files[-1], *files[:-1]]):
            _run(docker, "compose", *(word for file in overlays for word in ("-f", str(file))), "config", "--quiet")


def test_the_compose_services_share_what_they_must() -> None:
    compose, gpus = (
        _documents((_DEPLOY / "container" / name).read_text())[0] for name in ("compose.yaml", "compose.gpu.yaml")
    )
    services = compose["services"]
    assert services.keys() == gpus["services"].keys() == {"coordinator", "observer", "recorder", "waiter"}
    assert services["coordinator"]["ipc"] == "shareable"
    for name, service in services.items():
        assert service["user"] == f"{_UID}:{_UID}"
        assert service["volumes"] == ["runtime:/run/ipcsync"]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        if name != "coordinator":
            assert (service["ipc"], service["pid"]) == ("service:coordinator", "service:coordinator")
        if "entrypoint" in service:
            assert service["entrypoint"][:2] == ["python", "/opt/ipcsync/share/worker.py"]
        else:
            _parse(service["command"])
    assert compose["volumes"]["runtime"]["driver_opts"]["o"].endswith(f"mode=0700,uid={_UID},gid={_UID}")
    assert all(port.startswith("127.0.0.1:") for port in services["observer"]["ports"])


def test_the_example_worker_hands_records_over(coordinator: ipcsync.Coordinator) -> None:
    command = [sys.executable, str(_DEPLOY / "container" / "worker.py")]
    env = {**os.environ, "IPCSYNC_ENDPOINT": coordinator.endpoint}
    workers = [
        subprocess.Popen([*command, role, "2"], env=env, stdout=subprocess.PIPE, text=True)
        for role in ("wait", "record")
    ]
    try:
        said = [worker.communicate(timeout=_DEADLINE_S)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0]
    for role, text in zip(("wait", "record"), said, strict=True):
        assert re.findall(rf"^{role} example/tick #(\d)", text, re.MULTILINE) == ["1", "2"]


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def _objects(folder: Path = _BASE) -> dict[str, Any]:
    text = _run(_tool("kubectl"), "kustomize", folder)
    return {document["kind"]: document for document in _documents(text)}


@pytest.mark.process
@pytest.mark.parametrize("folder", [_BASE, _FLEET], ids=lambda folder: folder.name)
def test_kustomize_builds_objects_that_meet_the_apis_schema(folder: Path) -> None:
    objects = _objects(folder)
    assert objects.keys() == {"Namespace", "DaemonSet", "Deployment"}
    kubernetes = _module("kubernetes_validate")
    for document in objects.values():
        kubernetes.validate(document, kubernetes.latest_version(), strict=True)


@pytest.mark.process
def test_pods_have_what_each_engine_needs_and_no_privilege() -> None:
    objects = _objects()
    for kind in ("DaemonSet", "Deployment"):
        pod = objects[kind]["spec"]["template"]["spec"]
        assert (pod["hostIPC"], pod["hostPID"]) == (True, True)
        assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (_UID, True)
        (volume,) = pod["volumes"]
        assert volume["hostPath"]["path"] == "/run/ipcsync"
        for container in pod["containers"]:
            assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/run/ipcsync"]
            context = container["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert container["resources"].keys() == {"requests", "limits"}
            assert container["image"] == "ipcsync:local"
            if "args" in container:
                _parse(container["args"])


@pytest.mark.process
def test_the_bridge_of_a_pod_has_its_coordinators_directory_and_a_key_of_its_own() -> None:
    base, pod = (_objects(folder)["DaemonSet"]["spec"]["template"]["spec"] for folder in (_BASE, _FLEET))
    bridge, *others = pod["containers"]
    assert [each["name"] for each in others] == [each["name"] for each in base["containers"]]
    assert {each["image"] for each in (*pod["containers"], *pod["initContainers"])} == {"ipcsync:local"}
    name, *words = [word.replace("$(NODE)", "a") for word in bridge["args"]]
    assert name == "bridge"
    _parse([name, *words])
    settings = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
    assert settings["runtime-dir"] == "/run/ipcsync"
    mounts = {mount["mountPath"]: mount["name"] for mount in bridge["volumeMounts"]}
    assert mounts["/run/ipcsync"] == "runtime"
    (copies,) = [each for each in pod["initContainers"] if each["name"] == "own-key"]
    assert f"-m 0600 -o {_UID} -g {_UID}" in copies["command"][-1]  # as the bridge wants it
    copied = copies["command"][-1].replace("$(NODE)", "a").replace("/run/secrets/fleet/", "/run/fleet/")
    assert all(settings[f"tls-{kind}"] in copied for kind in ("ca", "cert", "key"))
    assert bridge["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.process
def test_probes_and_annotations_name_what_is_served() -> None:
    observer_app = pytest.importorskip("ipcsync_observer.app", reason="the extra `observer` is not installed")
    routes = set(re.findall(r'Route\("([^"]+)"', Path(observer_app.__file__).read_text()))
    template = _objects()["DaemonSet"]["spec"]["template"]
    coordinator, observer = template["spec"]["containers"]
    for name in ("startupProbe", "livenessProbe"):
        program, *words = coordinator[name]["exec"]["command"]
        assert program == "ipcsync"
        _parse(words)
    (port,) = observer["ports"]
    for name in ("livenessProbe", "readinessProbe"):
        probe = observer[name]["httpGet"]
        assert probe["path"] in routes
        assert probe["port"] == port["name"]
    annotations = template["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in routes
    assert annotations["prometheus.io/port"] == str(port["containerPort"])
    assert observer["args"][observer["args"].index("--port") + 1] == str(port["containerPort"])


# --- Prometheus -------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_promtool_takes_the_rules() -> None:
    assert "SUCCESS" in _run(_tool("promtool"), "check", "rules", _ALERTS)


@pytest.mark.process
def test_each_alert_fires_as_it_should() -> None:
    said = _run(_tool("promtool"), "test", "rules", _DEPLOY / "prometheus" / "alerts.test.yaml")
    assert "SUCCESS" in said
    rules = _documents(_ALERTS.read_text())[0]["groups"][0]["rules"]
    tests = (_DEPLOY / "prometheus" / "alerts.test.yaml").read_text()
    assert [rule["alert"] for rule in rules if tests.count(rule["alert"]) < 2 and "Missing" not in rule["alert"]] == []


def _exported() -> set[str]:
    """The names of all metrics, by what the observer's own code declares."""
    metrics = pytest.importorskip("ipcsync_observer.metrics", reason="the extra `observer` is not installed")
    source = Path(metrics.__file__).read_text()
    names = {f"ipcsync_{name}" for name in metrics.GAUGES}
    names |= {f"ipcsync_bridge_{name}_total" for name in metrics.BRIDGE_COUNTS}
    for family, name in re.findall(r'(\w+)MetricFamily\(\s*"(\w+)"', source):
        names |= {
            "Gauge": {name},
            "Counter": {f"{name}_total"},
            "Histogram": {f"{name}_bucket", f"{name}_count", f"{name}_sum"},
        }[family]
    return names


def test_alerts_name_only_metrics_that_are_exported() -> None:
    exported = _exported()
    assert {"ipcsync_up", "ipcsync_pool_size", "ipcsync_deaths_total", "ipcsync_request_seconds_bucket"} <= exported
    rules = _documents(_ALERTS.read_text())[0]["groups"][0]["rules"]
    named = {name for rule in rules for name in re.findall(r"\bipcsync_\w+", rule["expr"])}
    assert len(named) > 5
    assert named - exported == set()


# --- the pages --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=_READMES, ids=lambda page: page.parent.name)
def page(request: pytest.FixtureRequest) -> Path:
    """The page of each folder."""
    path = request.param
    assert isinstance(path, Path)
    return path


def test_every_folder_has_a_page_that_says_what_to_set_how_to_see_it_and_what_was_not_run(page: Path) -> None:
    assert {readme.parent.name for readme in _READMES} == {"container", "kubernetes", "prometheus", "systemd"}
    text = page.read_text()
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert [title for title in titles if not title.startswith("What each")] == [
        "What to set",
        "How to see that it works",
        "What was checked, and what was not",
    ]


def test_pages_name_files_settings_alerts_and_commands_that_there_are(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(r"\bdeploy/[\w./@-]*\w", text):
        assert (_ROOT / path).exists(), path
    for name in re.findall(r"IPCSYNC_([A-Z_]+)=?", text):
        assert name.lower() in config.FIELDS or name == "ENDPOINT", name
    assert set(re.findall(r"`(Ipcsync\w+)`", text)) <= set(re.findall(r"alert: (\w+)", _ALERTS.read_text()))
    assert set(re.findall(r"`(ipcsync_\w+)`", text)) <= _exported()
    for call in re.findall(r"(?:^|= *|-- |exec \w+ )ipcsync ([a-z][\w .:-]*)$", text, re.MULTILINE):
        _parse(call.split())


def test_nothing_names_a_registry() -> None:
    for path in _DEPLOY.rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert not re.search(r"https?://(?!127\.0\.0\.1)|docker\.io|ghcr|quay\.io|nvcr|pypi", text), path
