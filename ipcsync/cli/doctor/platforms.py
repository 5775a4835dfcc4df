"""The kind of machine, as far as it decides whether CUDA can share events between processes."""

from __future__ import annotations

import platform
from pathlib import Path

from ipcsync._drivers.outliving import mps_directory
from ipcsync.cli.doctor.report import Result


def kind(root: Path = Path("/")) -> tuple[Result, str, str]:
    """Plain Linux, WSL or Tegra; `root` is the directory with the machine's files."""
    machine = platform.machine()
    if "microsoft" in _read(root / "proc/version").lower() or (root / "dev/dxg").exists():
        return (
            "warn",
            f"WSL on {machine}: CUDA has no interprocess handles here",
            "Events use the engine 'timeline' if the check below says that it works.",
        )
    if (root / "etc/nv_tegra_release").exists() or "nvidia,tegra" in _read(root / "proc/device-tree/compatible"):
        return (
            "warn",
            f"Tegra (Jetson) on {machine}: older drivers have no interprocess handles here",
            "See the check ipc-attribute for the driver's claim, event-handles and timeline for what works.",
        )
    return "ok", f"Linux on {machine}, neither WSL nor Tegra", ""


def has_nvidia_gpu(root: Path = Path("/")) -> bool:
    """Whether the machine has a GPU of NVIDIA's, by its devices on PCI, whatever its driver does."""
    devices = (root / "sys/bus/pci/devices").glob("*/vendor")
    return any(
        _read(vendor).strip() == "0x10de" and _read(vendor.with_name("class")).startswith("0x03") for vendor in devices
    )


def mps(root: Path = Path("/")) -> tuple[Result, str, str]:
    """Whether a Multi-Process Service serves the GPU."""
    pipe = mps_directory()
    if not (root / pipe.lstrip("/") / "control").exists():
        return "ok", "no MPS daemon's pipe: processes use the GPU directly", ""
    return (
        "warn",
        f"an MPS daemon's pipe is in {pipe}",
        "Under MPS the GPU work of a process that died may go on in the server: whether it is over is never known, so "
        "reuse no memory that it could write. Of ipcsync, this command and hand-over on both engines were tried so.",
    )


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""
