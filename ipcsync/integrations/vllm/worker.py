"""The inference worker's side: it waits for the trainer's point, then loads the weights."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo

import ipcsync
from ipcsync.integrations.host_memory import HostMemory, opened
from ipcsync.integrations.vllm import message
from ipcsync.integrations.vllm.asleep import refuse_asleep


class PointWeightTransferEngine(IPCWeightTransferEngine):
    """vLLM's transfer by CUDA IPC, with ordered updates, and waits that end if the trainer dies.

    Stock CUDA IPC orders only the first rebuild of a storage, by an event; later updates of the same storage are not
    ordered. Here each update has a point, for which the worker waits before its stream reads. It waits on the host: a
    stream that waited for a trainer that died would refuse the updates of the next one too.
    """

    init_info_cls = message.PointInitInfo
    update_info_cls = message.PointUpdateInfo

    def init_transfer_engine(self, init_info: message.PointInitInfo) -> None:  # noqa: ARG002 - it holds nothing
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
        """Load one update, and return when the device has read it: the trainer may write again.

        Raises RecorderLost if the trainer died before its weights were complete, or the memory of CPU tensors has gone
        with it, and WorkerAsleep in sleep mode. The next update arrives all the same.
        """
        self._refuse_asleep("an update")
        self.receive_weights(self.parse_update_info(update_info))
        ipcsync.default_client().record(self._stream()).synchronize()

    def receive_weights(self, update_info: message.PointUpdateInfo) -> None:
        """Wait for the trainer's point, and load the tensors. ValueError if none are on this worker's device."""
        place = self._place()
        if place not in update_info.points:
            raise ValueError(f"no weights are on {place}; there are on {', '.join(update_info.points) or 'none'}")
        point = ipcsync.default_client().point(bytes.fromhex(update_info.points[place]))
        point.synchronize()
        told = update_info.tensors[place]
        if place != message.CPU:
            index = self.device.index
            stock = IPCWeightTransferUpdateInfo(
                names=update_info.names,
                dtype_names=update_info.dtype_names,
                shapes=update_info.shapes,
                ipc_handles=[{place: message.decode(tensor, index)} for tensor in told],
            )
            super().receive_weights(stock)
            return
        layouts = [
            (tuple(shape), message.dtype_of(name))
            for shape, name in zip(update_info.shapes, update_info.dtype_names, strict=True)
        ]
        weights = opened(HostMemory(**told[0]), layouts, point)
        self.model.load_weights(list(zip(update_info.names, weights, strict=True)))

    def _place(self) -> str:
        if self.device.type != "cuda":
            return message.CPU
        return str(torch.cuda.get_device_properties(self.device.index).uuid)

    def _stream(self) -> ipcsync.typing.StreamLike:
        return ipcsync.default_stream() if self.device.type != "cuda" else torch.cuda.current_stream(self.device)
