"""The inference worker's side: it waits for the trainer's point, then loads the weights."""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

import ipcsync
from ipcsync.integrations.buckets import received
from ipcsync.integrations.vllm import message
from ipcsync.integrations.vllm.asleep import refuse_asleep


class PointWeightTransferEngine(IPCWeightTransferEngine):
    """vLLM's transfer by CUDA IPC, with ordered updates, and waits that end if the trainer dies.

    Stock CUDA IPC orders only the first rebuild of a storage, by an event; later updates of the same storage are not
    ordered. Here each bucket has a point, for which the worker waits before its stream reads. It waits on the host: a
    stream that waited for a trainer that died would refuse the updates of the next one too. The model gets copies, so
    it may keep them, as vLLM's layerwise reload does.
    """

    init_info_cls = message.PointInitInfo
    update_info_cls = message.PointUpdateInfo

    def init_transfer_engine(self, init_info: message.PointInitInfo) -> None:
        """Connect now, so that a missing coordinator is found early. Raises ConnectError."""
        ipcsync.default_client()

    def start_weight_update(self) -> None:
        """As vLLM's. WorkerAsleep in sleep mode, before anything is touched."""
        self._refuse_asleep("an update")
        super().start_weight_update()

    def finish_weight_update(self) -> None:
        """As vLLM's. WorkerAsleep in sleep mode, before anything is touched."""
        self._refuse_asleep("the end of an update")
        super().finish_weight_update()

    def _refuse_asleep(self, what: str) -> None:
        if self.device.type == "cuda":
            refuse_asleep(self.model.parameters(), what)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket of an update, and return when it was read: the trainer may write to it again.

        Raises RecorderLost if the trainer died before its weights were complete, or the bucket has gone with it, and
        WorkerAsleep in sleep mode. The next update arrives all the same.
        """
        self._refuse_asleep("an update")
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: message.PointUpdateInfo) -> None:
        """Wait for the trainer's point, and load the weights. ValueError if no bucket is on this worker's device."""
        place = ipcsync.get_device_properties(self.device.index if self.device.type == "cuda" else None).uuid
        told = update_info.buckets.get(place)
        if told is None:
            raise ValueError(f"no weights are on {place}; there are on {', '.join(update_info.buckets) or 'none'}")
        point = ipcsync.default_client().point(bytes.fromhex(told.point))
        point.synchronize()
        weights = received(told.location, update_info.layouts, point, self.device)
        self.model.load_weights(list(zip(update_info.names, weights, strict=True)))
