"""What the doctor says of machines and drivers that there are none of here, by their files and its processes' words."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

import ipcsync
from ipcsync._linux.child import WorkerError
from ipcsync.cli.doctor import checks
from ipcsync.cli.doctor.checks import CHECKS, Context
from ipcsync.cli.doctor.workers import Workers
from ipcsync.cli.output import Finding
from ipcsync.typing import EngineName

_H100 = {"name": "NVIDIA H100", "uuid": "aa", "compute_mode": 0}
_ALONE = {**_H100, "uuid": "bb", "compute_mode": 3}


class _Told:
    """A process of the doctor that answers with what it was made with; an exception is raised."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self._answers = answers

    def call(self, function: Any, *_arguments: Any) -> Any:
        answer = self._answers[function.__name__]
        if isinstance(answer, Exception):
            raise answer
        return answer


class _Workers(dict[str, _Told]):
    """Both processes, over a coordinator: what is tried with them ends as these say."""

    endpoint = ""
    is_released = True
    dies = "RecorderLost", True

    def release(self) -> bool:
        return self.is_released

    def death(self, _: EngineName) -> tuple[str, bool]:
        return self.dies


def _context(waiter: dict[str, Any] | None = None, **recorder: Any) -> Context:
    """On a machine with a real GPU, beside a coordinator, unless the answers say otherwise."""
    workers = _Workers(recorder=_Told(recorder), waiter=_Told(waiter or {}))
    return Context(
        cast("Workers", workers),
        "ipc:///nowhere",
        ExitStack(),
        found={"driver": "cuda", "version": 13020, "devices": [_H100]},
        coordinator={"pid": 41, "has_keeper": True, "shares_pids": True},
        works={"event": True, "timeline": True},
    )


def _find(name: str, context: Context) -> Finding:
    (check,) = [check for known, check, _ in CHECKS if known == name]
    return Finding(name, *check(context))


def _drives(*devices: dict[str, Any]) -> dict[str, Any]:
    return {"driver": "cuda", "version": 12090, "devices": list(devices)}


@pytest.mark.parametrize(
    ("devices", "result", "said", "advised"),
    [
        ([_H100], "ok", "the cuda driver, CUDA 12.9", ""),
    ],
)
def test_a_driver_is_what_its_devices_are_called(
    devices: list[dict[str, Any]], result: str, said: str, advised: str
) -> None:
    found = _find("driver", _context(describe=_drives(*devices)))
    assert found.result == result
    assert said in found.detail
    assert advised in found.advice


@pytest.mark.parametrize(
    ("has_gpu", "chosen", "result"), [(True, "auto", "fail"), (True, "host", "warn"), (False, "auto", "warn")]
)
def test_the_software_driver_in_place_of_a_gpus_is_a_failure_unless_it_is_chosen(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, chosen: str, result: str
) -> None:
    monkeypatch.setenv("IPCSYNC_DRIVER", chosen)
    monkeypatch.setattr(checks, "_has_nvidia_gpu", lambda: has_gpu)
    found = _find("driver", _context(describe={**_drives(_H100), "driver": "host"}))
    assert found.result == result
    assert "IPCSYNC_DRIVER=cuda says why" in found.advice


def test_a_coordinator_of_another_driver_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, coordinator: ipcsync.Coordinator
) -> None:
    context = _context(connect=WorkerError("this coordinator uses the driver 'host', the client 'cuda'"))
    context.wanted = coordinator.endpoint
    found = _find("coordinator", context)
    assert found.result == "fail"
    assert f"the coordinator at {coordinator.endpoint} uses the driver 'host', and this process 'cuda'" in found.detail


def test_devices_are_those_that_both_processes_see() -> None:
    context = _context(waiter={"describe": _drives(_H100)})
    assert _find("devices", context).result == "ok"
    context.found["devices"] = [_H100, _ALONE]
    found = _find("devices", context)
    assert (found.result, "GPU-bb" in found.detail) == ("fail", True)
    context.found["devices"] = []
    assert "CUDA_VISIBLE_DEVICES" in _find("devices", context).advice


def test_a_gpu_is_shared_or_the_doctor_says_what_it_is() -> None:
    context = _context()
    assert _find("compute-mode", context).result == "ok"
    context.found["devices"] = [_H100, _ALONE]
    found = _find("compute-mode", context)
    assert (found.result, found.detail) == ("fail", "device 1: exclusive (one process)")
    assert "--compute-mode=DEFAULT" in found.advice


def test_two_pid_namespaces_are_told() -> None:
    context = _context()
    assert _find("pid-namespace", context).result == "ok"
    context.coordinator["shares_pids"] = False
    assert _find("pid-namespace", context).result == "warn"


def test_an_engine_that_does_not_work_is_a_warning_while_the_other_one_does() -> None:
    refused = {"ok": False, "why": "no handle for it"}
    context = _context(check={"event": refused, "timeline": refused})
    found = _find("event-handles", context)
    assert (found.result, found.detail) == ("warn", "device 0: no handle for it")
    assert context.works["event"] is False
    for word in ("'timeline'", "MIG", "WSL", "/dev/shm", "pid value"):
        assert word in found.advice
    assert _find("timeline", context).result == "fail"
    context.works["event"] = True
    found = _find("timeline", context)
    assert (found.result, "'event', which works" in found.advice) == ("warn", True)


def test_an_engine_whose_trial_breaks_off_does_not_work_for_that_reason() -> None:
    context = _context(check=WorkerError("the recorder process ended: killed by SIGSEGV"))
    assert _find("event-handles", context).detail == "device 0: the recorder process ended: killed by SIGSEGV"


def test_a_stream_that_the_coordinators_store_does_not_wake_is_told() -> None:
    context = _context()
    assert _find("cpu-writes", context).result == "ok"
    cast("_Workers", context.workers).is_released = False
    found = _find("cpu-writes", context)
    assert (found.result, "did not wake" in found.detail, "ahead=True" in found.advice) == ("warn", True, True)
    context.works["timeline"] = False
    assert _find("cpu-writes", context).result == _find("hardware-queues", context).result == "skipped"


@pytest.mark.parametrize(
    ("outcome", "goes_on", "result", "said"),
    [
        ("RecorderLost", True, "ok", "went on"),
        ("RecorderLost", False, "warn", "stays blocked"),
        ("complete", True, "fail", "the waiter got complete"),
    ],
)
def test_a_dead_recorders_work_is_lost_and_its_waiters_go_on_or_the_doctor_says_so(
    outcome: str, goes_on: bool, result: str, said: str
) -> None:
    context = _context()
    cast("_Workers", context.workers).dies = outcome, goes_on
    context.works["event"] = False
    found = _find("recorder-death", context)
    assert (found.result, said in found.detail, "event:" in found.detail) == (result, True, False)
    assert bool(found.advice) == (result != "ok")


def test_a_check_that_a_later_one_needs_stops_the_rest() -> None:
    context = _context(describe=WorkerError("the recorder process did not answer"))
    findings = checks._run(context)
    assert [finding.result for finding in findings] == ["fail"] + ["skipped"] * (len(CHECKS) - 1)
    assert "IPCSYNC_DRIVER=host" in findings[0].advice
    assert findings[-1].detail == "not tried: driver failed"


# --- by the machine's files -------------------------------------------------------------------------------------------


def test_mps_is_known_by_its_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    assert checks._mps(tmp_path)[0] == "ok"
    (tmp_path / "run/mps").mkdir(parents=True)
    (tmp_path / "run/mps/control").touch()
    assert checks._mps(tmp_path)[0] == "ok"
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", f"/{'x' * 300}")
    assert checks._mps(tmp_path)[0] == "ok", "where it cannot look, it is not told of any"
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")
    result, detail, advice = checks._mps(tmp_path)
    assert (result, "/run/mps" in detail, "never known" in advice) == ("warn", True, True)


@pytest.mark.parametrize(
    ("vendor", "kind", "expected"),
    [("0x10de", "0x030200", True), ("0x10de", "0x040300", False), ("0x1002", "0x030000", False)],
)
def test_a_gpu_of_nvidias_is_seen_by_its_pci_device(tmp_path: Path, vendor: str, kind: str, expected: bool) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    assert checks._has_nvidia_gpu(tmp_path) is expected
