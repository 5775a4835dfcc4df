"""What the doctor says of machines and drivers that there are none of here, by what its processes told it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, cast

import pytest

import ipcsync
from ipcsync.cli.doctor import checks, platforms, two_process_checks
from ipcsync.cli.doctor.checks import CHECKS, Context
from ipcsync.cli.doctor.report import Finding
from ipcsync.cli.doctor.workers import CheckFailed, Workers

_H100 = {"name": "NVIDIA H100", "uuid": "aa", "ipc_events": True, "compute_mode": 0}
_ALONE = {**_H100, "uuid": "bb", "compute_mode": 3}
_HERE = {"shm": (1, 2), "namespace": 7, "pid": 40}


class _Told:
    """A process of the doctor that answers with what it was made with; an exception is raised."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self._answers = answers
        self.was_killed = False

    def call(self, function: Any, **_keywords: Any) -> Any:
        answer = self._answers[function.__name__]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        self.was_killed = True


def _context(waiter: dict[str, Any] | None = None, **recorder: Any) -> Context:
    """On a machine with a real GPU, beside a coordinator, unless the answers say otherwise."""
    workers = {"recorder": _Told(recorder), "waiter": _Told(waiter or {})}
    return Context(
        cast("Workers", workers),
        "ipc:///nowhere",
        ExitStack(),
        found={"driver": "cuda", "version": 13020, "devices": [_H100]},
        place=dict(_HERE),
        theirs={**_HERE, "pid": 41},
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
    monkeypatch.setattr(platforms, "has_nvidia_gpu", lambda: has_gpu)
    found = _find("driver", _context(describe={**_drives(_H100), "driver": "host"}))
    assert found.result == result
    assert "IPCSYNC_DRIVER=cuda says why" in found.advice


def test_a_coordinator_of_another_driver_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, coordinator: ipcsync.Coordinator
) -> None:
    context = _context(connect=CheckFailed("this coordinator uses the driver 'host', the client 'cuda'"))
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


def test_a_gpu_is_whole_and_shared_or_the_doctor_says_what_it_is() -> None:
    context = _context()
    assert (_find("mig", context).result, _find("compute-mode", context).result) == ("ok", "ok")
    context.found["devices"] = [_H100, _ALONE]
    found = _find("compute-mode", context)
    assert (found.result, found.detail) == ("fail", "device 1: exclusive (one process)")
    assert "--compute-mode=DEFAULT" in found.advice


@pytest.mark.parametrize(
    ("mine", "theirs", "result", "said"),
    [
        ((1, 2), (1, 2), "ok", "share /dev/shm"),
        (None, (1, 2), "warn", "there is no /dev/shm here"),
        ((1, 2), None, "skipped", "cannot be looked at"),
        ((1, 2), (1, 3), "warn", "do not share /dev/shm"),
    ],
)
def test_dev_shm_is_one_for_both_or_the_doctor_says_whose_it_is(mine: Any, theirs: Any, result: str, said: str) -> None:
    context = _context(place={**_HERE, "shm": mine})
    context.theirs["shm"] = theirs
    found = _find("dev-shm", context)
    assert (found.result, said in found.detail) == (result, True)


def test_two_pid_namespaces_are_told_and_so_is_the_same_pid_in_both() -> None:
    context = _context()
    assert (_find("pid-namespace", context).result, _find("pid-values", context).result) == ("ok", "ok")
    context.theirs.update(namespace=8)
    assert (_find("pid-namespace", context).result, _find("pid-values", context).result) == ("warn", "ok")
    context.theirs.update(pid=40)
    found = _find("pid-values", context)
    assert (found.result, "the same pid value, 40" in found.detail) == ("warn", True)


def test_an_engine_that_does_not_work_is_a_warning_while_the_other_one_does() -> None:
    refused = {"ok": False, "why": "no handle for it"}
    context = _context(check={"event": refused, "timeline": refused})
    found = _find("event-handles", context)
    assert (found.result, found.detail) == ("warn", "device 0: no handle for it")
    assert (context.works["event"], "'timeline'" in found.advice) == (False, True)
    assert _find("timeline", context).result == "fail"
    context.works["event"] = True
    found = _find("timeline", context)
    assert (found.result, "'event', which works" in found.advice) == ("warn", True)


def test_an_engine_whose_trial_breaks_off_does_not_work_for_that_reason() -> None:
    context = _context(check=CheckFailed("the recorder process ended: killed by SIGSEGV"))
    assert _find("event-handles", context).detail == "device 0: the recorder process ended: killed by SIGSEGV"


def test_a_stream_that_no_store_wakes_is_told_and_its_process_killed() -> None:
    context = _context(waiter={"try_gate": False})
    found = _find("cpu-writes", context)
    assert (found.result, "did not wake" in found.detail, "ahead=True" in found.advice) == ("warn", True, True)
    assert cast("_Told", context.workers["waiter"]).was_killed
    context = _context(waiter={"try_gate": True})
    context.works["timeline"] = False
    assert _find("cpu-writes", context).result == "ok"
    assert _find("hardware-queues", context).result == "skipped"


@pytest.mark.parametrize(
    ("outcome", "goes_on", "result", "said"),
    [
        ("RecorderLost", True, "ok", "went on"),
        ("RecorderLost", False, "warn", "stays blocked"),
        ("complete", True, "fail", "the waiter got complete"),
    ],
)
def test_a_dead_recorders_work_is_lost_and_its_waiters_go_on_or_the_doctor_says_so(
    monkeypatch: pytest.MonkeyPatch, outcome: str, goes_on: bool, result: str, said: str
) -> None:
    monkeypatch.setattr(two_process_checks, "death", lambda *_: (outcome, goes_on))
    context = _context()
    context.works["event"] = False
    found = _find("recorder-death", context)
    assert (found.result, said in found.detail, "event:" in found.detail) == (result, True, False)
    assert bool(found.advice) == (result != "ok")


def test_a_check_that_a_later_one_needs_stops_the_rest() -> None:
    context = _context(describe=CheckFailed("the recorder process did not answer"))
    findings = checks._run(context)
    assert [finding.result for finding in findings] == ["fail"] + ["skipped"] * (len(CHECKS) - 1)
    assert "IPCSYNC_DRIVER=host" in findings[0].advice
    assert findings[-1].detail == "not tried: driver failed"
