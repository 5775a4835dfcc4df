"""What the bridge does to a slot and reads from it has the order of the link's model (link_model)."""

from __future__ import annotations

from typing import Any

import pytest

from ipcsync._board import BROKEN, INT64_MAX, OPEN
from ipcsync._wire.messages import Attachment, Origin
from ipcsync_bridge.exports import Export
from ipcsync_bridge.subscriber import Mirror
from ipcsync_bridge.wire import Row

_ATTACHMENT = Attachment("kv", 3, 7, 100, "gpu", "timeline", 1, True, [], Origin(b"e" * 16, 1, 2, "a"))


class _Line:
    """A slot's line that tells the order in which it is used."""

    completed_address = 0

    def __init__(self, **words: int) -> None:
        self.values: dict[str, Any] = {"incarnation": 7, "state": OPEN, "has_expired": False, "lost": 0, **words}
        self.values.setdefault("recorded", 100)
        self.values.setdefault("completed", 100)
        self.order: list[str] = []
        self.futex = self

    address = 0

    def wake(self) -> None:
        self.order.append("wake")

    def publish(self, count: int) -> None:
        self.order.append(f"recorded {count}")

    def store_completed(self, count: int) -> None:
        self.order.append(f"completed {count}")

    def store_behind(self, count: int) -> None:
        self.order.append(f"behind {count}")

    def lose(self, count: int, root_cause: int) -> None:
        self.order.append(f"lost {count} {root_cause}")

    def __getattr__(self, name: str) -> Any:
        self.order.append(name)
        return self.values[name]


class _Board:
    def __init__(self, line: _Line) -> None:
        self.line = line

    def slot(self, _index: int) -> _Line:
        return self.line


def _mirror(line: _Line, row: Row) -> Mirror:
    mirror = Mirror(_Board(line), _ATTACHMENT, row)  # type: ignore[arg-type] # as much of a board as is used
    mirror._word = line  # type: ignore[assignment]
    line.order.clear()
    return mirror


def test_link_order_a_mirror_stores_recorded_then_completed_then_wakes() -> None:
    line = _Line()
    mirror = _mirror(line, Row(1, 2, recorded=5, completed=3, lost=5))
    mirror.store()
    stores = [step for step in line.order if " " in step or step == "wake"]
    assert stores == ["recorded 105", "completed 103", "wake", "wake", "lost 105 0"]
    assert line.order[:2] == ["state", "incarnation"] or line.order[:2] == ["incarnation", "state"]


@pytest.mark.parametrize("words", [{"state": BROKEN}, {"incarnation": 8}], ids=str)
def test_link_order_nothing_is_stored_on_a_use_that_is_over(words: dict[str, int]) -> None:
    line = _Line(**words)
    mirror = _mirror(line, Row(1, 2, recorded=5, completed=3))
    mirror.store()
    assert not {step for step in line.order if " " in step or step == "wake"}


def test_link_order_new_code_stores_what_is_newer_than_what_the_old_one_stored() -> None:
    line = _Line(recorded=105, completed=104)
    mirror = _mirror(line, Row(1, 2))
    for row, stored in (
        (Row(1, 2, recorded=4, completed=4), []),
        (Row(1, 2, recorded=6, completed=5), ["recorded 106", "completed 105"]),
    ):
        line.order.clear()
        mirror.row = row
        mirror.store()
        assert [step for step in line.order if " " in step] == stored


class _Nothing:
    """A slot that stands behind nothing."""

    def first_unsettled(self) -> int:
        return 0


def _export(**words: int) -> Export:
    line = _Line(recorded=107, watermark=0, **words)
    export = Export.__new__(Export)
    export.key, export._base, export._line, export._dependencies = (3, 7), 100, line, _Nothing()  # type: ignore[assignment]
    return export


def test_link_order_a_look_reads_the_word_before_the_state_and_caps_it_at_what_is_recorded() -> None:
    export = _export(completed=109)
    row, _ = export.read()
    assert (row.recorded, row.completed, row.state) == (7, 7, "open")
    order = export._line.order  # type: ignore[attr-defined]
    assert order[0] == "completed"
    assert order.index("completed") < order.index("state") < order.index("recorded")


def test_link_order_a_released_word_says_nothing_and_the_watermark_counts() -> None:
    export = _export(completed=INT64_MAX, state=BROKEN)
    export._line.values["watermark"] = 104  # type: ignore[attr-defined]
    row, _ = export.read()
    assert (row.completed, row.state, row.cause) == (4, "broken", "died")
