"""A planted overflow of the compiled core's: `make sanitize` first sees that its sanitizers find this one."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ipcsync._engines import core
from tests.faults.compiled_rig import Rig
from tests.faults.test_board_order import Case

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(core, Path(folder), Case("record", depth=4))
        rig.engine._keep_event(rig.case.depth, 1)  # one behind the ring
        rig.close()
