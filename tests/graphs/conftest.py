"""What these tests begin with."""

from __future__ import annotations

import pytest

import ipcsync


@pytest.fixture
def coordinator(any_coordinator: ipcsync.Coordinator) -> ipcsync.Coordinator:
    """These tests are of what happens between its clients: any will do."""
    return any_coordinator
