"""The doctor, hand-over, and the price of a turn under NVIDIA's Multi-Process Service, which is started for them alone.

    IPCSYNC_DRIVER=cuda python -m tests.gpu.under_mps

The service has a directory of its own, so that no other process of the machine becomes its client; it is stopped at the
end, and no setting of the GPU is changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

_CONTROL = "nvidia-cuda-mps-control"
_CLI = [sys.executable, "-m", "ipcsync"]
_GRAPHS = [
    word
    for name in ("feeder_and_drainer", "hardware_queues", "death_amid_a_graph", "memory_of_the_dead")
    for word in ("--only", name)
]
_RUNS: tuple[Sequence[str], ...] = (
    [*_CLI, "doctor"],
    [*_CLI, "bench", "--quick", "--only", "hand_over"],
    [sys.executable, "-m", "tests.gpu.questions", "--only", "turns"],
    [sys.executable, "-m", "tests.gpu.questions", *_GRAPHS],
)


def main() -> int:
    """Exit status 1 if one of them failed; 0 where the service is not installed, which is said."""
    program = shutil.which(_CONTROL, path=f"{os.environ.get('PATH', '')}:/usr/local/nvidia/bin:/usr/bin")
    if program is None:
        sys.stdout.write(f"not run under MPS: there is no {_CONTROL} here\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="ipcsync-mps-") as folder:
        env = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([program, "-d"], env=env, check=True, timeout=20)
        failed = False
        try:
            for command in _RUNS:
                sys.stdout.write(f"=== {' '.join(command[1:])}\n")
                sys.stdout.flush()
                failed = subprocess.run(command, env=env, check=False).returncode != 0 or failed
        finally:
            subprocess.run([program], input=b"quit\n", env=env, check=False, timeout=20)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
