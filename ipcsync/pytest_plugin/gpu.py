"""Whether there is a real GPU, asked without loading CUDA into the process that asks."""

from __future__ import annotations

import functools
import os
import subprocess

from ipcsync._linux.child import PYTHON, environment

# NVIDIA's kernel driver: on a PC or server, under WSL, on a Tegra. The software driver has none of them.
KERNEL_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu", "/dev/nvgpu")
_COUNT = "import ipcsync; print(ipcsync.device_count())"
_ASK_S = 60.0


@functools.cache
def why_not() -> str | None:
    """Why no test that needs a GPU can run here; None if it can. The first call may start a process for a second."""
    if not any(os.path.exists(path) for path in KERNEL_DRIVERS):
        return "no real GPU here: NVIDIA's kernel driver is not loaded"
    try:
        asked = subprocess.run(
            [*PYTHON, "-c", _COUNT],
            env=environment({"IPCSYNC_DRIVER": "cuda"}),
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no usable GPU here: the CUDA driver did not answer within {_ASK_S:g} s"
    if asked.returncode != 0:
        return f"no usable GPU here: {(asked.stderr.strip() or 'the CUDA driver does not load').splitlines()[-1]}"
    return None if int(asked.stdout) > 0 else "no GPU is visible here"
