"""Whether a worker's weights are there: vLLM's sleep mode takes their memory, and a write to it ends the process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cuda.bindings.driver import CUpointer_attribute

from ipcsync import _drivers
from ipcsync._drivers import SUCCESS
from ipcsync.integrations.vllm.errors import WorkerAsleep

_MAPPED = CUpointer_attribute.CU_POINTER_ATTRIBUTE_MAPPED


def is_mapped(address: int) -> bool:
    """Whether the driver has memory behind a device address. Only reserved addresses, as in sleep mode, have none."""
    code, value = _drivers.load().cuPointerGetAttribute(_MAPPED, address)
    return bool(code is SUCCESS and value)


def refuse_asleep(parameters: Iterable[Any], what: str) -> None:
    """Raise WorkerAsleep if one of the model's CUDA parameters has no memory behind it."""
    for parameter in parameters:
        if parameter.is_cuda and parameter.numel() and not is_mapped(parameter.data_ptr()):
            raise WorkerAsleep(
                f"this worker sleeps: its weights have no memory, and {what} is refused, since it would write there; "
                "wake it up first (wake_up(tags=['weights']) is enough), then send the update again from its start"
            )
