"""Ray's direct transport of tensors between actors of one machine, ordered by points.

    from ipcsync.integrations.ray import register

    register()  # before a class names it, in the process that creates the actors

    @ray.remote(enable_tensor_transport=True)  # receivers too
    class Encoder:
        @ray.method(tensor_transport="ipcsync")
        def encode(self, batch): ...

Ray's own transport by CUDA IPC keeps its event in a local variable, so that the event may be gone before the receiver
opens it, and kills both actors if a transfer fails. Here the coordinator owns the event, and a transfer can be aborted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from ray.experimental.rdt import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
    register_tensor_transport,
)
from ray.experimental.rdt.tensor_transport_manager import FetchRequest

import ipcsync
from ipcsync._deadline import deadline_of, left_of
from ipcsync.errors import IpcSyncError, WaitTimeout
from ipcsync.integrations.buckets import Bucket, Sent, bucket_for, device_of, received, size_of

__all__ = ["PointTransport", "TransferAborted", "register"]


class TransferAborted(IpcSyncError):  # noqa: N818 - as the errors of ipcsync are named
    """Ray gave up a transfer that this process was waiting for."""


def register(name: str = "ipcsync") -> None:
    """Register the transport for the classes and actors of this process. ValueError if the name is taken."""
    register_tensor_transport(name, ["cuda", "cpu"], PointTransport, torch.Tensor)


@dataclass
class PointMetadata(TensorTransportMetadata):
    """The message to the receiver about one object's tensors."""

    sent: Sent | None = None
    """The bucket that they are in; None without tensors."""


@dataclass
class Transfer(FetchRequest):
    """Tensors that are not here before their point is complete."""

    metadata: PointMetadata | None = None
    point: ipcsync.Point | None = None
    """The point that the host waits for; None if there is nothing to receive, or it was received."""
    targets: Sequence[torch.Tensor] | None = None
    over: threading.Event = field(default_factory=threading.Event)
    is_aborted: bool = False


class PointTransport(TensorTransportManager):
    """The sender copies tensors into a bucket on their GPU, and the receiver out of it, behind the sender's point.

    The receiver waits on the host, on the thread by which Ray receives, so no stream of it ever waits for a sender that
    died, and what it hands out is complete. Both are on one GPU, which is found by its UUID. Tensors of the CPU take
    the same way, for trying a program without a GPU.

    If the sender dies, the receiver raises RecorderLost: it is unknown whether the sender's work had ended, so its
    tensors are not handed out.
    """

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}  # of what this process sends, by object
        self._waited_for: weakref.WeakValueDictionary[int, Transfer] = weakref.WeakValueDictionary()  # by their ids

    def tensor_transport_backend(self) -> str:
        """The name by which methods ask for it."""
        return "IPCSYNC"

    @staticmethod
    def is_one_sided() -> bool:
        """The receiver does it all."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """A wait on the host can be cancelled, so no actor has to be killed."""
        return True

    def actor_has_tensor_transport(self, actor: object) -> bool:
        """Always True: asking the actor would block the caller, and a failed transfer says why."""
        return True

    def get_communicator_metadata(
        self, src_actor: object, dst_actor: object, backend: str | None = None
    ) -> CommunicatorMetadata:
        """None: the point is enough."""
        return CommunicatorMetadata()

    # --- the sender ---------------------------------------------------------------------------------------------------

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[torch.Tensor]) -> PointMetadata:
        """Copy the tensors into a bucket, and record behind that; returns the message to the receiver.

        ValueError if they are on several devices. RecorderLost if they depend on tensors of a sender that died; the
        next call does not raise it again, once the stream is past the wait for that sender.
        """
        tensors = rdt_object
        metadata = PointMetadata(tensor_meta=[(tensor.shape, tensor.dtype) for tensor in tensors])
        if not tensors:
            return metadata
        device = device_of(tensors)
        metadata.tensor_device = device.type
        self.garbage_collect(obj_id, metadata, tensors)
        bucket = bucket_for(size_of(metadata.tensor_meta), device)
        try:
            metadata.sent = bucket.fill(tensors)
        except BaseException:
            bucket.close()  # Ray knows of no object, so it will not ask for that
            raise
        self._buckets[obj_id] = bucket
        return metadata

    def send_multiple_tensors(
        self, tensors: list[torch.Tensor], tensor_transport_metadata: object, communicator_metadata: object
    ) -> None:
        """Never called: the transport is one-sided."""
        raise NotImplementedError("the transport is one-sided: the receiver opens the tensors")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: object, tensors: list[torch.Tensor]) -> None:
        """Leave the memory of an object without references to later ones."""
        bucket = self._buckets.pop(obj_id, None)
        if bucket is not None:
            bucket.close()

    # --- the receiver -------------------------------------------------------------------------------------------------

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: PointMetadata,
        communicator_metadata: object,
        target_buffers: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """The tensors, in `target_buffers` if they are given.

        Raises RecorderLost if the sender died, TransferAborted, and StalePoint (a RecorderLost) for a sender with
        another coordinator, as on another machine; but HandleError if a bridge is between the two.
        """
        transfer = self.fetch_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata, target_buffers)
        return self.wait_fetch_complete(transfer)

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: PointMetadata,
        communicator_metadata: object,
        target_buffers: Sequence[torch.Tensor] | None = None,
    ) -> Transfer:
        """Begin to wait for the sender's point. The host waits for the coordinator only, at a sender's first one."""
        metadata = tensor_transport_metadata
        if metadata.sent is None:
            return Transfer(obj_id, [])
        point = metadata.sent.received_point()
        transfer = Transfer(obj_id, [], metadata, point, target_buffers)
        self._waited_for[id(transfer)] = transfer
        over = transfer.over
        point.add_done_callback(lambda _: over.set())
        return transfer

    def wait_fetch_complete(self, fetch_request: Transfer, timeout: float = -1) -> list[torch.Tensor]:
        """The tensors of a fetch, at most `timeout` seconds later; below 0: without a limit. Raises WaitTimeout."""
        point, metadata = fetch_request.point, fetch_request.metadata
        if point is None or metadata is None or metadata.sent is None:
            return list(fetch_request.tensors)
        limit = None if timeout < 0 else timeout
        deadline = deadline_of(limit)
        if not fetch_request.over.wait(limit):
            text = f"object {fetch_request.obj_id} was not complete within {timeout:g} s"
            raise WaitTimeout(text, event=point.event_name, generation=point.generation, timeout=timeout)
        if fetch_request.is_aborted:
            raise TransferAborted(f"Ray gave up the transfer of object {fetch_request.obj_id}")
        point.synchronize(limit)  # it is over: this raises what ended it
        device = torch.device("cuda", point.device.index) if metadata.tensor_device == "cuda" else torch.device("cpu")
        left = None if limit is None else left_of(deadline)
        tensors = received(metadata.sent, metadata.tensor_meta, point, device, fetch_request.targets, left)
        fetch_request.tensors, fetch_request.point = tensors, None
        return list(tensors)

    def abort_transport(self, obj_id: str, communicator_metadata: object) -> None:
        """End this process's waits for an object."""
        for found in self._waited_for.valuerefs():  # at once, since other threads begin some
            if (transfer := found()) is not None and transfer.obj_id == obj_id:
                transfer.is_aborted = True
                transfer.over.set()
