"""LMCache's own unit tests with ipcsync's events and with its stock ones: `python -m tests.integrations.lmcache_suite`.

It runs those of the tests in LMCache's source distribution that have to do with events, twice, and compares the two
runs test by test. It fails for each test that passes with the stock events only, but for those that are listed here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import ipcsync

_TESTS = [
    "cli/commands/bench/test_server_bench.py",
    "v1/multiprocess/test_async_engine_driven_transfer_context.py",
    "v1/multiprocess/test_engine_driven_transfer.py",
    "v1/multiprocess/test_event_ipc_handle_path.py",
    "v1/multiprocess/test_futures.py",
    "v1/multiprocess/test_grpc_transport.py",
    "v1/multiprocess/test_l1_owner_completion.py",
    "v1/multiprocess/test_lmcache_driven_transfer_skip.py",
    "v1/multiprocess/test_qstore.py",
    "v1/multiprocess/test_worker_liveness.py",
    "v1/platform",
    "v1/test_atom_mp_adapter.py",
    "v1/test_sglang_mp_adapter.py",
    "v1/test_tensorrt_mp_adapter.py",
    "v1/test_vllm_mp_adapter.py",
]
_THEIR_CLASS = "asserts the class of the stock events"
_THEIR_DEVICES = "replaces the devices, or torch, by fakes that lack the one that $LMCACHE_DEVICE_BACKEND names"
_UNRECORDED = "exports an event before it is recorded"
_AUTO = "v1.platform.test_device_plugins::test_cuda_device_type_auto_selects_runtime_backend"
_EXPECTED = {
    "v1.multiprocess.test_futures::test_device_future_stub_end_to_end": "imports 15 bytes, which are not a point",
    f"{_AUTO}[13.0-None-CudaDeviceSpec-cuda]": _THEIR_DEVICES,
    f"{_AUTO}[None-7.2-RocmDeviceSpec-rocm]": _THEIR_DEVICES,
    "v1.platform.test_device_plugins::test_external_device_participates_in_runtime_detection": _THEIR_DEVICES,
    "v1.platform.devices.rbln.test_rbln_support::test_detect_device_selects_rbln_when_forced": _THEIR_DEVICES,
    "v1.platform.test_event_ipc::test_default_backend_stub_end_to_end": _UNRECORDED,
    "v1.platform.test_event_ipc::test_get_event_ipc_backend_accepts_string_device_type": _UNRECORDED,
    "v1.platform.test_event_ipc::test_get_event_ipc_backend_resolves_cpu_to_default": _THEIR_CLASS,
    "v1.platform.test_event_ipc::test_get_event_ipc_backend_cpu_uses_stub_when_accelerator_is_active": _THEIR_CLASS,
}
_DEADLINE_S = 1800


def _results(source: Path, report: Path, env: dict[str, str]) -> dict[str, str]:
    """What became of each test: passed, failed, error or skipped."""
    options = f"-q -p no:logging -p no:randomly -p no:ipcsync --timeout 120 --junitxml {report}".split()
    files = [str(source / "tests" / name) for name in _TESTS]
    settings = {**os.environ, **env, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files], env=settings, cwd=source, timeout=_DEADLINE_S, check=False
    )
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = [part.tag for part in case if part.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
        found[name] = outcome[0] if outcome else "passed"
    return found


def main(source: Path) -> int:
    """1 if a test that is not listed passes with the stock events only."""
    with tempfile.TemporaryDirectory() as reports, ipcsync.launch(driver="host", log_level="error") as coordinator:
        stock = _results(source, Path(reports, "stock.xml"), {})
        ours_is_chosen = {
            "LMCACHE_DEVICE_BACKEND": "ipcsync",
            "IPCSYNC_ENDPOINT": coordinator.endpoint,
            "IPCSYNC_DRIVER": "host",
        }
        ours = _results(source, Path(reports, "ours.xml"), ours_is_chosen)
    for name, results in (("stock", stock), ("ipcsync", ours)):
        counts = {outcome: list(results.values()).count(outcome) for outcome in sorted(set(results.values()))}
        sys.stdout.write(f"{name}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}\n")
    worse = [test for test, outcome in stock.items() if outcome == "passed" and ours.get(test) != "passed"]
    for test in worse:
        sys.stdout.write(f"with stock events only: {test}: {_EXPECTED.get(test, 'NOT EXPECTED')}\n")
    return int(len(stock) < 100 or any(test not in _EXPECTED for test in worse))


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).absolute()))
