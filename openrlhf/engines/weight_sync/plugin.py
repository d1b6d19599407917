"""Makes the gloo transport known to vLLM, in every process that vLLM starts.

vLLM finds :func:`register` through the ``vllm.general_plugins`` entry point of an installed openrlhf, and through
:class:`WorkerExtension` (``worker_extension_cls``) where openrlhf is only on the path.
"""

from __future__ import annotations

import hashlib
import os

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from openrlhf.utils.process import die_with_parent

ENGINE_PID_VARIABLE = "OPENRLHF_ENGINE_PID"
"""Set by an engine actor to its process id; the vLLM processes below it die with their parents."""

_MODULE = "openrlhf.engines.weight_sync.gloo"


def register() -> None:
    """Register the ``gloo`` transport with both of vLLM's factories; calling it again does nothing."""
    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", _MODULE, "GlooWeightTransferEngine")
    if "gloo" not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine("gloo", _MODULE, "GlooTrainerWeightTransferEngine")
    if os.environ.get(ENGINE_PID_VARIABLE, str(os.getpid())) != str(os.getpid()):
        die_with_parent()


register()


class WorkerExtension:
    """Methods added to every vLLM worker, called with ``collective_rpc``."""

    def weight_digests(self) -> dict[str, str]:
        """SHA-256 of each of this worker's parameters, in vLLM's own names and layout."""
        model: torch.nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        return {
            name: hashlib.sha256(
                parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            ).hexdigest()
            for name, parameter in model.named_parameters()
        }
