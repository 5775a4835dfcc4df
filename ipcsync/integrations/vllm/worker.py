"""The inference worker's side: it waits for the trainer's point, then loads the weights."""

from __future__ import annotations

from typing import Any

from cuda.bindings.driver import CUpointer_attribute
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

import ipcsync
from ipcsync import _drivers
from ipcsync._drivers import SUCCESS
from ipcsync.integrations.buckets import received
from ipcsync.integrations.vllm.errors import WorkerAsleep
from ipcsync.integrations.vllm.trainer import PointInitInfo, PointUpdateInfo

_MAPPED = CUpointer_attribute.CU_POINTER_ATTRIBUTE_MAPPED


class PointWeightTransferEngine(IPCWeightTransferEngine):
    """vLLM's transfer by CUDA IPC, with ordered updates, and waits that end if the trainer dies.

    Stock CUDA IPC orders only the first rebuild of a storage, by an event; later updates of the same storage are not
    ordered. Here each bucket has a point, for which the worker waits before its stream reads. It waits on the host: a
    stream that waited for a trainer that died would refuse the updates of the next one too. The model gets copies, so
    it may keep them, as vLLM's layerwise reload does.
    """

    init_info_cls = PointInitInfo
    update_info_cls = PointUpdateInfo

    def init_transfer_engine(self, init_info: PointInitInfo) -> None:
        """Connect now, so that a missing coordinator is found early. Raises ConnectError."""
        ipcsync.default_client()

    _unfinished: tuple[Any, Any] | None = None  # the model of an update that has begun, and its configuration
    _sender: int | None = None  # the process whose buckets it has

    def start_weight_update(self) -> None:
        """As vLLM's. WorkerAsleep in sleep mode, before anything is touched."""
        self._refuse_asleep("an update")
        target = self.model, self.model_config
        if self._unfinished is not None:  # what an update that failed has left half loaded would count for this one
            self.set_weight_update_target(*self._unfinished)
            super().finish_weight_update()
            self.set_weight_update_target(*target)
        self._unfinished, self._sender = target, None
        super().start_weight_update()

    def finish_weight_update(self) -> None:
        """As vLLM's. WorkerAsleep in sleep mode, before anything is touched."""
        self._refuse_asleep("the end of an update")
        super().finish_weight_update()
        self._unfinished = None

    def _refuse_asleep(self, what: str) -> None:
        """Raise WorkerAsleep if a weight has no memory, as in sleep mode: a write to it would end the process."""
        for weight in self.model.parameters() if self.device.type == "cuda" else ():
            if weight.is_cuda and weight.numel() and not _is_mapped(weight.data_ptr()):
                raise WorkerAsleep(
                    f"this worker sleeps: its weights have no memory, and {what} is refused, since it would write "
                    "there; wake it up first (wake_up(tags=['weights']) is enough), then send the update again from "
                    "its start"
                )

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket of an update, and return when it was read: the trainer may write to it again.

        Raises RecorderLost if the trainer died before its weights were complete, or the bucket has gone with it, and
        WorkerAsleep in sleep mode. The next update arrives all the same.
        """
        self._refuse_asleep("an update")
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: PointUpdateInfo) -> None:
        """Wait for the trainer's point, and load the weights. ValueError if no bucket is on this worker's device."""
        place = ipcsync.get_device_properties(self.device.index if self.device.type == "cuda" else None).uuid
        told = update_info.buckets.get(place)
        if told is None:
            raise ValueError(f"no weights are on {place}; there are on {', '.join(update_info.buckets) or 'none'}")
        if self._sender not in (None, told.pid):
            raise ValueError(f"process {told.pid} sends into the update of process {self._sender}, which took over")
        self._sender = told.pid
        point = told.received_point()
        point.synchronize()
        weights = received(told, update_info.layouts, point, self.device)
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check  # takes seconds

        with disable_mtp_completeness_check():  # a bucket has a part of the weights
            self.model.load_weights(list(zip(update_info.names, weights, strict=True)))


def _is_mapped(address: int) -> bool:
    """Whether the driver has memory behind a device address. Only reserved addresses, as in sleep mode, have none."""
    code, value = _drivers.load().cuPointerGetAttribute(_MAPPED, address)
    return bool(code is SUCCESS and value)
