"""What is checked, in order, and what follows from each result for the user."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ipcsync.cli.doctor import trials
from ipcsync.cli.doctor.crew import Crew, TrialError
from ipcsync.cli.doctor.report import Finding, Result
from ipcsync.errors import IpcSyncError
from ipcsync.typing import EngineName

_COMPUTE_MODES = {0: "default", 1: "exclusive (one thread)", 2: "prohibited", 3: "exclusive (one process)"}
_ENGINES: tuple[EngineName, ...] = ("event", "timeline")


@dataclass
class Patient:
    """What is known so far of the machine."""

    crew: Crew
    wanted: str  # the endpoint asked for
    rest: ExitStack
    endpoint: str = ""
    found: dict[str, Any] = field(default_factory=dict)  # the driver and devices
    place: dict[str, Any] = field(default_factory=dict)  # where a client stands
    theirs: dict[str, Any] = field(default_factory=dict)  # where the coordinator stands
    works: dict[str, bool] = field(default_factory=dict)  # by engine

    @property
    def is_host(self) -> bool:
        """Whether the driver is the host driver, which has no GPU."""
        return bool(self.found["driver"] == "host")

    @property
    def is_software(self) -> bool:
        """Whether libcuda is a stand-in: a GPU of NVIDIA's says so in its name."""
        return not self.is_host and not all(device["name"].startswith("NVIDIA") for device in self.found["devices"])


def run(endpoint: str) -> list[Finding]:
    """All checks. None hangs, and nothing of them is left behind."""
    with ExitStack() as rest, Crew() as crew:
        return list(_run(Patient(crew, endpoint, rest)))


def _run(patient: Patient) -> Iterator[Finding]:
    stopped = ""
    for name, check, is_vital in CHECKS:
        if stopped:
            yield Finding(name, "skipped", f"not tried: {stopped}")
            continue
        try:
            result, detail, advice = check(patient)
        except (TrialError, IpcSyncError) as error:
            result, detail, advice = "fail", str(error), _ON_FAILURE.get(name, "")
        yield Finding(name, result, detail, advice)
        if result == "fail" and is_vital:
            stopped = f"{name} failed"


Outcome = tuple[Result, str, str]


# --- the machine ------------------------------------------------------------------------------------------------------


def _driver(patient: Patient) -> Outcome:
    patient.found = patient.crew["recorder"].call("describe")
    version = patient.found["version"]
    number = f"{version // 1000}.{version % 1000 // 10}"
    if patient.is_host:
        return (
            "warn",
            f"the host driver, CUDA {number}: software, no GPU",
            "Everything works as on a GPU, between processes too, but no GPU's work is ordered. With a GPU here, "
            "IPCSYNC_DRIVER=cuda says why its driver is not used.",
        )
    if patient.is_software:
        name = patient.found["devices"][0]["name"]
        return (
            "warn",
            f"the cuda driver, CUDA {number}, from a software libcuda (its device is called {name!r})",
            "This stands in for NVIDIA's driver and moves no GPU: what passes here is no proof for a GPU.",
        )
    return "ok", f"the cuda driver, CUDA {number}", ""


def _devices(patient: Patient) -> Outcome:
    mine = patient.found["devices"]
    if not mine:
        return "fail", "the driver shows no device", "Look at CUDA_VISIBLE_DEVICES, and at nvidia-smi."
    theirs = patient.crew["waiter"].call("describe")["devices"]
    names = "; ".join(f"{i}: {device['name']} GPU-{device['uuid']}" for i, device in enumerate(mine))
    if [device["uuid"] for device in theirs] != [device["uuid"] for device in mine]:
        return "fail", f"a second process sees other devices than the first: {names}", "Is the machine being changed?"
    return "ok", names, ""


def _mig(patient: Patient) -> Outcome:
    if patient.is_host or patient.is_software:
        return "skipped", "no GPU here", ""
    devices = patient.found["devices"]
    split = [i for i, device in enumerate(devices) if " MIG " in device["name"] or not device["ipc_events"]]
    if split:
        return (
            "warn",
            f"devices {', '.join(map(str, split))} are MIG instances, or have no interprocess events",
            "MIG has no CUDA IPC: events there use the engine 'timeline'.",
        )
    return "ok", "no device is a MIG instance; all have interprocess events", ""


def _compute_mode(patient: Patient) -> Outcome:
    if patient.is_host or patient.is_software:
        return "skipped", "no GPU here", ""
    modes = {i: device["compute_mode"] for i, device in enumerate(patient.found["devices"])}
    odd = {i: mode for i, mode in modes.items() if mode != 0}
    if odd:
        text = ", ".join(f"device {i}: {_COMPUTE_MODES.get(mode, mode)}" for i, mode in odd.items())
        return (
            "fail",
            text,
            "Several processes must share the device: nvidia-smi --compute-mode=DEFAULT, or use MPS.",
        )
    return "ok", "default: any number of processes may use each device", ""


# --- where the processes stand ----------------------------------------------------------------------------------------


def _coordinator(patient: Patient) -> Outcome:
    from ipcsync._wire import endpoints

    if os.path.exists(endpoints.socket_path(patient.wanted)):
        try:
            patient.theirs = patient.crew["recorder"].call("connect", endpoint=patient.wanted)
        except TrialError as error:
            _own_coordinator(patient)
            return (
                "warn",
                f"none serves {patient.wanted} ({error}); the rest is tried with one of the doctor's own",
                "A coordinator serves its own uid and driver only. Is it running? Start one with: ipcsync coordinator",
            )
        patient.endpoint = patient.wanted
        return "ok", f"pid {patient.theirs['pid']} serves {patient.wanted}", ""
    _own_coordinator(patient)
    return (
        "ok",
        f"none at {patient.wanted}; the rest is tried with one of the doctor's own",
        "Workers need one: ipcsync coordinator",
    )


def _own_coordinator(patient: Patient) -> None:
    import ipcsync

    own = patient.rest.enter_context(ipcsync.launch(driver=patient.found["driver"], log_level="error"))
    patient.endpoint = own.endpoint
    patient.theirs = patient.crew["recorder"].call("connect", endpoint=own.endpoint)


def _dev_shm(patient: Patient) -> Outcome:
    patient.place = patient.crew["recorder"].call("place")
    theirs = patient.theirs["shm"]
    if theirs is None:
        return (
            "skipped",
            "the coordinator's /dev/shm cannot be looked at from here",
            "The next checks try what needs it.",
        )
    if theirs != patient.place["shm"]:
        return (
            "warn",
            "this process and the coordinator do not share /dev/shm",
            "CUDA's event handles need it, so events use the engine 'timeline'. Share it between containers: "
            "--ipc=host, or one /dev/shm volume for all.",
        )
    return "ok", "this process and the coordinator share /dev/shm", ""


def _pid_namespace(patient: Patient) -> Outcome:
    if patient.theirs["namespace"] != patient.place["namespace"]:
        return (
            "warn",
            "this process and the coordinator are in two pid namespaces",
            "It works: deaths are told by file locks instead of pidfds. To share one: --pid=host.",
        )
    return "ok", "this process and the coordinator share a pid namespace", ""


def _pid_values(patient: Patient) -> Outcome:
    same = patient.theirs["namespace"] == patient.place["namespace"]
    if not same and patient.theirs["pid"] == patient.place["pid"]:
        return (
            "warn",
            f"this process and the coordinator have the same pid value, {patient.place['pid']}",
            "CUDA takes one's event handles for the other's own, so events use the engine 'timeline'. Start the "
            "processes of a container in another order, or share a pid namespace.",
        )
    return "ok", "no process has the coordinator's pid value", ""


# --- the engines ------------------------------------------------------------------------------------------------------


def _event_handles(patient: Patient) -> Outcome:
    return _engine(patient, "event", "recorded in one process, waited for by a stream of another")


def _timeline(patient: Patient) -> Outcome:
    return _engine(
        patient, "timeline", "the board's page registered, written by a stream, read by the CPU and by another's wait"
    )


def _engine(patient: Patient, engine: EngineName, what: str) -> Outcome:
    count = len(patient.found["devices"])
    reasons = {device: _why_not(patient, engine, device) for device in range(count)}
    problems = [f"device {device}: {reason}" for device, reason in reasons.items() if reason]
    patient.works[engine] = not problems
    if not problems:
        return "ok", f"{what}, on {count} device{'s' if count > 1 else ''}", ""
    text = "; ".join(problems)
    if engine == "event":
        return "warn", text, "Events use the engine 'timeline' where that works: see the next check."
    if patient.works["event"]:
        return "warn", text, "Events use the engine 'event', which works. Waiting ahead of a record does not."
    return "fail", text, "Neither engine works between two processes here, so nothing can be shared."


def _why_not(patient: Patient, engine: EngineName, device: int) -> str:
    """Why an engine does not work on a device, empty if it does."""
    try:
        report = patient.crew["recorder"].call("check", endpoint=patient.endpoint, device=device)[engine]
        if report["ok"]:
            trials.hand_over(patient.crew, patient.endpoint, engine, device)
    except TrialError as error:
        return str(error)
    return str(report["why"])


def _cpu_writes(patient: Patient) -> Outcome:
    advice = (
        "The coordinator cannot release a stream that waits for a record which never comes: do not wait with "
        "ahead=True, and use the engine 'event'."
    )
    if not patient.crew["waiter"].call("try_gate"):
        patient.crew["waiter"].kill()  # its stream can never go on
        return "warn", "a plain store did not wake a stream that waits for pinned memory", advice
    if not patient.works["timeline"]:
        return "ok", "a plain store wakes a stream that waits for pinned memory", ""
    if not trials.release(patient.crew, patient.endpoint):
        return "warn", "the coordinator's store to the board did not wake a stream that waits for it", advice
    return "ok", "a plain store wakes a waiting stream, in pinned memory and, by the coordinator, on the board", ""


def _recorder_death(patient: Patient) -> Outcome:
    texts, advice = [], []
    for engine in _ENGINES:
        if not patient.works[engine]:
            continue
        found = trials.death(patient.crew, patient.endpoint, engine)
        stream = "its stream went on" if found.stream_goes_on else "its stream stays blocked"
        texts.append(f"{engine}: the waiter was told {found.told}, {stream}")
        if found.told != "RecorderLost":
            return "fail", "; ".join(texts), _NOT_LOST
        if not found.stream_goes_on:
            advice.append(_BLOCKED[engine])
    return ("warn" if advice else "ok"), "; ".join(texts), " ".join(advice)


_NOT_LOST = "A dead process's work was not told as lost: do not rely on this driver."
_BLOCKED = {
    "event": "This driver leaves a dead process's event pending for ever. Host calls end all the same, but a stream "
    "that waits for it has to be abandoned; on the engine 'timeline' the coordinator releases it.",
    "timeline": "The coordinator could not release the stream.",
}


# --- what CUDA leaves open --------------------------------------------------------------------------------------------


def _double_open(patient: Patient) -> Outcome:
    if not patient.works["event"]:
        return "skipped", "event handles do not work here", ""
    handle = patient.crew["recorder"].call("export")
    said = patient.crew["waiter"].call("open_twice", handle=handle)
    if said in {"the same", "another"}:
        return "ok", f"a handle opens a second time in one process, and gives {said} CUevent", ""
    return "ok", f"a handle does not open a second time in one process: {said}", "ipcsync opens each one once."


def _re_export(patient: Patient) -> Outcome:
    if not patient.works["event"]:
        return "skipped", "event handles do not work here", ""
    handle = patient.crew["recorder"].call("export")
    said = patient.crew["waiter"].call("export_imported", handle=handle)
    if said in {"the same", "another"}:
        return "ok", f"an imported event gives {said} handle", ""
    return "ok", f"an imported event gives no handle: {said}", "ipcsync hands on the coordinator's own."


_ON_FAILURE = {
    "driver": "Is a driver installed? IPCSYNC_DRIVER=host works without one.",
    "coordinator": "Start one by hand to see what it says: ipcsync coordinator",
}
CHECKS: tuple[tuple[str, Callable[[Patient], Outcome], bool], ...] = (
    ("driver", _driver, True),
    ("devices", _devices, True),
    ("mig", _mig, False),
    ("compute-mode", _compute_mode, True),
    ("coordinator", _coordinator, True),
    ("dev-shm", _dev_shm, True),
    ("pid-namespace", _pid_namespace, False),
    ("pid-values", _pid_values, False),
    ("event-handles", _event_handles, False),
    ("timeline", _timeline, True),
    ("cpu-writes", _cpu_writes, False),
    ("recorder-death", _recorder_death, False),
    ("double-open", _double_open, False),
    ("re-export", _re_export, False),
)
"""Name, check, and whether the later ones make no sense if it fails."""
