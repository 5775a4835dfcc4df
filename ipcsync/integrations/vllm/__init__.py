"""vLLM's weight transfer between a trainer and workers of one machine, ordered by points: backend "ipcsync"."""

from __future__ import annotations

import logging

BACKEND = "ipcsync"
_log = logging.getLogger(__name__)


def load_plugin() -> None:
    """vLLM calls this in each of its processes; does nothing if that vLLM has no such factories."""
    try:
        register()
    except ImportError as error:
        _log.info("this vLLM has no known interface for weight transfer: %s", error)


def register() -> None:
    """Register both sides with vLLM's factories. A trainer calls it; vLLM's workers do by themselves."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for factory, module, name in (
        (WeightTransferEngineFactory, "worker", "PointWeightTransferEngine"),
        (WeightTransferTrainerFactory, "trainer", "PointTrainerWeightTransferEngine"),
    ):
        if BACKEND not in factory._registry:  # noqa: SLF001 - plugins may be loaded twice in a process, as vLLM says
            factory.register_engine(BACKEND, f"{__name__}.{module}", name)
