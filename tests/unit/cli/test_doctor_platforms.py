"""What the doctor says of machines that there are none of here, by the files that they have."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipcsync.cli.doctor import platforms
from ipcsync.cli.doctor.checks import _ipc_attribute, _mig

_WSL = "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@941d701f84f1)"


def _machine(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "result", "said"),
    [
        ({"proc__version": "Linux version 6.1.0-28-amd64"}, "ok", "neither WSL nor Tegra"),
        ({"proc__version": _WSL}, "warn", "WSL"),
        ({"dev__dxg": ""}, "warn", "WSL"),
        ({"etc__nv_tegra_release": "# R36 (release)"}, "warn", "Tegra"),
        ({"proc__device-tree__compatible": "nvidia,p3737\0nvidia,tegra234\0"}, "warn", "Tegra"),
        ({}, "ok", "neither WSL nor Tegra"),
    ],
)
def test_a_machine_is_known_by_its_files(tmp_path: Path, files: dict[str, str], result: str, said: str) -> None:
    found, detail, advice = platforms.kind(_machine(tmp_path, **files))
    assert (found, said in detail, bool(advice)) == (result, True, result == "warn")


def test_mps_is_known_by_its_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    assert platforms.mps(tmp_path)[0] == "ok"
    _machine(tmp_path, run__mps__control="")
    assert platforms.mps(tmp_path)[0] == "ok"
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")
    result, detail, advice = platforms.mps(tmp_path)
    assert (result, "/run/mps" in detail, "never known" in advice) == ("warn", True, True)


class _Context:
    """A machine with a GPU that is split, and one whose driver shares no events."""

    is_host = is_software = False

    def __init__(self) -> None:
        split = {"name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "ipc_events": True}
        self.found = {"devices": [split, {"name": "NVIDIA Orin", "ipc_events": False}]}


def test_mig_and_the_drivers_own_word_are_two_things() -> None:
    assert _mig(_Context())[:2] == ("warn", "MIG instances: devices 0")  # type: ignore[arg-type]
    result, detail, _ = _ipc_attribute(_Context())  # type: ignore[arg-type]
    assert (result, detail.endswith("on devices 1")) == ("warn", True)


@pytest.mark.parametrize(
    ("vendor", "kind", "expected"),
    [("0x10de", "0x030200", True), ("0x10de", "0x040300", False), ("0x1002", "0x030000", False)],
)
def test_a_gpu_of_nvidias_is_seen_by_its_pci_device(tmp_path: Path, vendor: str, kind: str, expected: bool) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    assert platforms.has_nvidia_gpu(tmp_path) is expected
