"""The checks, in order, and the advice that follows from each result."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ipcsync
from ipcsync._drivers import mps_directory
from ipcsync._linux.child import WorkerError
from ipcsync._session.handshake import Reader
from ipcsync._wire import endpoints
from ipcsync.cli.doctor import workers
from ipcsync.cli.doctor.workers import Workers
from ipcsync.cli.output import Findings, Outcome
from ipcsync.errors import IpcSyncError
from ipcsync.typing import EngineName

_COMPUTE_MODES = {1: "exclusive (one thread)", 2: "prohibited", 3: "exclusive (one process)"}
_READ_S = 2.0


@dataclass
class Context:
    """The results so far."""

    workers: Workers
    wanted: str  # the endpoint asked for
    rest: ExitStack
    found: dict[str, Any] = field(default_factory=dict)  # the driver and devices
    coordinator: dict[str, Any] = field(default_factory=dict)  # its pid, and what is known of it
    works: dict[str, bool] = field(default_factory=dict)  # by engine
    do_streams_pass: bool = True


def run(endpoint: str) -> Findings:
    """Run all checks. None hangs, and their processes are gone afterwards."""
    with ExitStack() as rest, Workers() as both:
        return _run(Context(both, endpoint, rest))


def _run(context: Context) -> Findings:
    found = Findings()
    for name, check, is_vital in CHECKS:
        try:
            outcome = found.skips or check(context)
        except IpcSyncError as error:
            outcome = "fail", str(error), _ON_FAILURE.get(name, "")
        found.add(name, outcome, is_vital=is_vital)
    return found


# --- the machine ------------------------------------------------------------------------------------------------------


def _driver(context: Context) -> Outcome:
    context.found = context.workers["recorder"].call(workers.describe)
    version = context.found["version"]
    number = f"{version // 1000}.{version % 1000 // 10}"
    if context.found["driver"] != "host":
        return "ok", f"the cuda driver, CUDA {number}", ""
    if os.environ.get("IPCSYNC_DRIVER") != "host" and _has_nvidia_gpu():
        return (
            "fail",
            f"the software driver (host), CUDA {number}, though this machine has an NVIDIA GPU",
            "A coordinator that starts now uses it too. IPCSYNC_DRIVER=cuda says why the GPU's driver is not used; "
            "with IPCSYNC_DRIVER=host, software is what you chose.",
        )
    return (
        "warn",
        f"the software driver (host), CUDA {number}: no GPU",
        "Everything works as on a GPU, between processes too, but it orders no GPU work. If there is a GPU, "
        "IPCSYNC_DRIVER=cuda says why its driver is not used.",
    )


def _has_nvidia_gpu(root: Path = Path("/")) -> bool:
    """Whether the machine has a GPU of NVIDIA's, by its devices on PCI, whatever its driver does."""
    with suppress(OSError):  # one has just been removed
        return any(
            vendor.read_text().strip() == "0x10de" and vendor.with_name("class").read_text().startswith("0x03")
            for vendor in (root / "sys/bus/pci/devices").glob("*/vendor")
        )
    return False


def _devices(context: Context) -> Outcome:
    mine = context.found["devices"]
    if not mine:
        return "fail", "the driver shows no device", "Check CUDA_VISIBLE_DEVICES and the output of nvidia-smi."
    theirs = context.workers["waiter"].call(workers.describe)["devices"]
    names = "; ".join(f"{i}: {device['name']} GPU-{device['uuid']}" for i, device in enumerate(mine))
    if [device["uuid"] for device in theirs] != [device["uuid"] for device in mine]:
        return "fail", f"a second process sees other devices than the first: {names}", "Is the machine being changed?"
    return "ok", names, ""


def _mps(root: Path = Path("/")) -> Outcome:
    pipe = mps_directory()
    if not os.path.exists(root / pipe.lstrip("/") / "control"):
        return "ok", "no MPS daemon's pipe: processes use the GPU directly", ""
    return (
        "warn",
        f"an MPS daemon's pipe is in {pipe}",
        "Under MPS the GPU work of a process that died may go on in the server: whether it is over is never known, so "
        "reuse no memory that it could write. Of ipcsync, this command and hand-over on both engines were tried so.",
    )


def _compute_mode(context: Context) -> Outcome:
    if context.found["driver"] == "host":
        return "skipped", "no GPU here", ""
    modes = [device["compute_mode"] for device in context.found["devices"]]
    odd = ", ".join(f"device {i}: {_COMPUTE_MODES.get(mode, mode)}" for i, mode in enumerate(modes) if mode != 0)
    if odd:
        return "fail", odd, "Several processes must share the device: nvidia-smi --compute-mode=DEFAULT, or use MPS."
    return "ok", "default: any number of processes may use each device", ""


# --- the coordinator --------------------------------------------------------------------------------------------------


def _coordinator(context: Context) -> Outcome:
    if not os.path.exists(endpoints.socket_path(context.wanted)):
        _own_coordinator(context)
        found = f"none at {context.wanted}; the rest is tried with one of the doctor's own"
        return "ok", found, "Workers need one: ipcsync coordinator"
    try:
        _connect(context, context.wanted)
    except WorkerError as error:
        theirs, ours = "", context.found["driver"]
        with suppress(IpcSyncError), Reader(context.wanted, _READ_S) as reader:  # which needs no session
            theirs = reader.stats()["driver"]
        if theirs not in ("", ours):
            found = f"the coordinator at {context.wanted} uses the driver {theirs!r}, and this process {ours!r}"
            advice = "Was it started before the GPU's driver was up? Start it again, with IPCSYNC_DRIVER=cuda."
            return "fail", found, advice
        _own_coordinator(context)
        found = f"no session with {context.wanted} ({error}); the rest is tried with a coordinator of the doctor's own"
        advice = "Is it running, of this uid and driver, and has it sessions left? If not: ipcsync coordinator"
        return "warn", found, advice
    found = f"pid {context.coordinator['pid']} serves {context.wanted}"
    if context.coordinator["has_keeper"]:
        return "ok", f"{found}, as the keeper of a coordinator that may die", ""
    return "ok", f"{found}, without a keeper", "Its death ends every session; without --no-keeper it would not."


def _connect(context: Context, endpoint: str) -> None:
    context.coordinator = context.workers["recorder"].call(workers.connect, endpoint)
    context.workers.endpoint = endpoint


def _own_coordinator(context: Context) -> None:
    own = context.rest.enter_context(ipcsync.launch(driver=context.found["driver"], log_level="error"))
    _connect(context, own.endpoint)


def _pid_namespace(context: Context) -> Outcome:
    if context.coordinator["shares_pids"]:
        return "ok", "this process and the coordinator share a pid namespace", ""
    advice = "It works: deaths are detected by file locks instead of pidfds. To share one: --pid=host."
    return "warn", "this process and the coordinator are in two pid namespaces", advice


# --- the engines ------------------------------------------------------------------------------------------------------


_TRIED = {
    "event": "recorded in one process, waited for by a stream of another",
    "timeline": "the board's page registered, written by a stream, read by the CPU and by another's wait",
}


def _engine(engine: EngineName, context: Context) -> Outcome:
    count = len(context.found["devices"])
    reasons = {device: _why_not(context, engine, device) for device in range(count)}
    problems = [f"device {device}: {reason}" for device, reason in reasons.items() if reason]
    context.works[engine] = not problems
    if not problems:
        return "ok", f"{_TRIED[engine]}, on {count} device{'s' if count > 1 else ''}", ""
    text = "; ".join(problems)
    if engine == "event":
        return (
            "warn",
            text,
            "Events use the engine 'timeline' where that works: see the next check. CUDA has no handles for events "
            "under MIG, in WSL and on older Tegras; containers share them with --ipc=host, or one /dev/shm volume for "
            "all, if no process has the coordinator's pid value.",
        )
    if context.works["event"]:
        return "warn", text, "Events use the engine 'event', which works. Waiting ahead of a record does not."
    return "fail", text, "Neither engine works between two processes here, so nothing can be shared."


def _why_not(context: Context, engine: EngineName, device: int) -> str | None:
    try:
        report = context.workers["recorder"].call(workers.check, context.workers.endpoint, device)[engine]
        if report["ok"]:
            context.workers.hand_over(engine, device)
    except WorkerError as error:
        return str(error)
    return str(report["why"]) or None


def _hardware_queues(context: Context) -> Outcome:
    if not context.works["timeline"]:
        return "skipped", "it is asked by words, which do not work", ""
    context.do_streams_pass = context.workers["waiter"].call(workers.do_streams_pass)
    if context.do_streams_pass:
        return "ok", "streams go on beside one that waits", ""
    return (
        "warn",
        "streams of a process share a hardware queue: one that waits holds others back",
        "Set CUDA_DEVICE_MAX_CONNECTIONS to 8 or more before CUDA is initialised. Until then ahead=True is refused, "
        "and a stream's wait for another process may stop work that has nothing to do with it.",
    )


def _cpu_writes(context: Context) -> Outcome:
    if not context.works["timeline"] or not context.do_streams_pass:
        return "skipped", "no stream may wait ahead of a record here", ""
    if context.workers.release():
        return "ok", "the coordinator's store to the board wakes a stream that waits for it", ""
    return (
        "warn",
        "the coordinator's store to the board did not wake a stream that waits for it",
        "The coordinator cannot release a stream that waits for a record which never comes: do not wait with "
        "ahead=True, and use the engine 'event'.",
    )


def _recorder_death(context: Context) -> Outcome:
    texts, advice = [], []
    for engine, if_blocked in _IF_BLOCKED.items():
        if not context.works[engine]:
            continue
        outcome, stream_goes_on = context.workers.death(engine)
        stream = "its stream went on" if stream_goes_on else "its stream stays blocked"
        texts.append(f"{engine}: the waiter got {outcome}, {stream}")
        if outcome != "RecorderLost":
            return "fail", texts[-1], "A dead process's work is not reported as lost: do not rely on this driver."
        if not stream_goes_on:
            advice.append(if_blocked)
    return ("warn" if advice else "ok"), "; ".join(texts), " ".join(advice)


_IF_BLOCKED: dict[EngineName, str] = {
    "event": "This driver leaves a dead process's event pending for ever. Host calls end nevertheless, but a stream "
    "that waits for it must be abandoned; on the engine 'timeline' the coordinator releases it.",
    "timeline": "The coordinator could not release the stream.",
}


_ON_FAILURE = {
    "driver": "Is a driver installed? IPCSYNC_DRIVER=host works without one.",
    "coordinator": "Start one by hand to see what it says: ipcsync coordinator",
}
CHECKS: tuple[tuple[str, Callable[[Context], Outcome], bool], ...] = (
    ("driver", _driver, True),
    ("devices", _devices, True),
    ("mps", lambda _: _mps(), False),
    ("compute-mode", _compute_mode, True),
    ("coordinator", _coordinator, True),
    ("pid-namespace", _pid_namespace, False),
    ("event-handles", partial(_engine, "event"), False),
    ("timeline", partial(_engine, "timeline"), True),
    ("hardware-queues", _hardware_queues, False),
    ("cpu-writes", _cpu_writes, False),
    ("recorder-death", _recorder_death, False),
)
"""Name, check, and whether a failure makes the later checks meaningless."""
