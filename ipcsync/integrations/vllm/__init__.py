"""vLLM's weight transfer between a trainer and workers of one machine, ordered by points: backend "ipcsync"."""

from __future__ import annotations

import logging

BACKEND = "ipcsync"
_log = logging.getLogger(__name__)


def load_plugin() -> None:
    """What vLLM calls in each of its processes; a vLLM without these factories goes on without them."""
    try:
        register()
    except ImportError as error:
        _log.info("this vLLM has no weight transfer that ipcsync knows: %s", error)


def register() -> None:
    """Offer both sides to vLLM's factories. vLLM's workers do so by themselves, a trainer calls it."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for factory, module, name in (
        (WeightTransferEngineFactory, "worker", "PointWeightTransferEngine"),
        (WeightTransferTrainerFactory, "trainer", "PointTrainerWeightTransferEngine"),
    ):
        if BACKEND not in factory._registry:  # noqa: SLF001 - plugins may be loaded twice in a process, as vLLM says
            factory.register_engine(BACKEND, f"{__name__}.{module}", name)
