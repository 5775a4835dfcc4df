"""A planted overflow of the compiled core's: `make sanitize` first sees that its sanitizers find this one."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.faults.compiled_rig import Case, Rig

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(Case("record", depth=4), Path(folder))
        rig.engine.depth += 1
        rig.engine.open_first(rig.engine.depth)  # one behind the ring
        rig.close()
