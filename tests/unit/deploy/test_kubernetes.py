"""The objects for Kubernetes: the APIs' schema, what pods have and what they may, and their probes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploy.deploying import (
    DEPLOY,
    UID,
    documents,
    module,
    parse,
    run,
    tool,
)

_BASE = DEPLOY / "kubernetes" / "base"
_FLEET = DEPLOY / "kubernetes" / "fleet"


def _objects(folder: Path = _BASE) -> dict[str, Any]:
    text = run(tool("kubectl"), "kustomize", folder)
    return {document["kind"]: document for document in documents(text)}


@pytest.mark.process
@pytest.mark.parametrize("folder", [_BASE, _FLEET], ids=lambda folder: folder.name)
def test_kustomize_builds_objects_that_meet_the_apis_schema(folder: Path) -> None:
    objects = _objects(folder)
    assert objects.keys() == {"Namespace", "DaemonSet", "Deployment"}
    kubernetes = module("kubernetes_validate")
    for document in objects.values():
        kubernetes.validate(document, kubernetes.latest_version(), strict=True)


@pytest.mark.process
def test_pods_have_what_each_engine_needs_and_no_privilege() -> None:
    objects = _objects()
    for kind in ("DaemonSet", "Deployment"):
        pod = objects[kind]["spec"]["template"]["spec"]
        assert (pod["hostIPC"], pod["hostPID"]) == (True, True)
        assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (UID, True)
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
                parse(container["args"])


@pytest.mark.process
def test_the_bridge_of_a_pod_has_a_name_its_coordinators_directory_and_a_key_of_its_own(tmp_path: Path) -> None:
    base, pod = (_objects(folder)["DaemonSet"]["spec"]["template"]["spec"] for folder in (_BASE, _FLEET))
    bridge, *others = pod["containers"]
    assert [each["name"] for each in others] == [each["name"] for each in base["containers"]]
    assert {each["image"] for each in (*pod["containers"], *pod["initContainers"])} == {"ipcsync:local"}
    shown = tmp_path / "ipcsync"
    shown.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    shown.chmod(0o700)
    arguments = [word.replace("$(NODE)", "a.b") for word in bridge["args"]]
    environment = {**os.environ, "NODE": "a.b", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    name, *words = subprocess.check_output([*bridge["command"], *arguments], env=environment, text=True).splitlines()
    assert name == "bridge"
    parse([name, *words])
    settings = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
    assert (settings["node"], settings["runtime-dir"]) == ("a_b", "/run/ipcsync")
    mounts = {mount["mountPath"]: mount["name"] for mount in bridge["volumeMounts"]}
    assert mounts["/run/ipcsync"] == "runtime"
    (copies,) = [each for each in pod["initContainers"] if each["name"] == "own-key"]
    assert f"-m 0600 -o {UID} -g {UID}" in copies["command"][-1]  # as the bridge wants it
    copied = copies["command"][-1].replace("$(NODE)", "a.b").replace("/run/secrets/fleet/", "/run/fleet/")
    assert all(settings[f"tls-{kind}"] in copied for kind in ("ca", "cert", "key"))
    assert bridge["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.process
def test_probes_and_annotations_name_what_is_served() -> None:
    observer_app = pytest.importorskip("ipcsync_observer.app", reason="the extra `observer` is not installed")
    routes = set(observer_app.PATHS)
    template = _objects()["DaemonSet"]["spec"]["template"]
    coordinator, observer = template["spec"]["containers"]
    program, *words = coordinator["startupProbe"]["exec"]["command"]
    assert program == "ipcsync"
    parse(words)
    assert "livenessProbe" not in coordinator, "its failure would end all sessions"
    assert "env" not in observer, "it loads no driver"
    (port,) = observer["ports"]
    for name in ("livenessProbe", "readinessProbe"):
        probe = observer[name]["httpGet"]
        assert probe["path"] in routes
        assert probe["port"] == port["name"]
    annotations = template["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in routes
    assert annotations["prometheus.io/port"] == str(port["containerPort"])
    assert observer["args"][observer["args"].index("--port") + 1] == str(port["containerPort"])
