"""The driver's numbers are those of the binding."""

from __future__ import annotations

import pytest
from cuda.bindings import driver as binding

from ipcsync import _drivers

_NUMBERS = {
    name: value
    for name, value in vars(_drivers).items()
    if name.startswith(("ERROR_", "EVENT_", "MEMHOSTREGISTER_", "STREAM_"))
}
_FLAGS = (
    binding.CUevent_flags,
    binding.CUstream_flags,
    binding.CUstreamWaitValue_flags,
    binding.CUstreamWriteValue_flags,
)


@pytest.mark.parametrize("name", _NUMBERS)
def test_a_number_is_the_bindings(name: str) -> None:
    if name.startswith("ERROR_"):
        theirs = getattr(binding.CUresult, f"CUDA_{name}")
    elif name.startswith("MEMHOSTREGISTER_"):
        theirs = getattr(binding, f"CU_{name}")
    else:
        (theirs,) = [getattr(kind, f"CU_{name}") for kind in _FLAGS if hasattr(kind, f"CU_{name}")]
    assert _NUMBERS[name] == int(theirs)


def test_there_are_numbers() -> None:
    assert len(_NUMBERS) > 10
