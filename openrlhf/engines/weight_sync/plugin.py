"""Makes the transports of this package known to vLLM, in every process that vLLM starts.

vLLM finds :func:`register` through the ``vllm.general_plugins`` entry point of an installed openrlhf, and through
:class:`WorkerExtension` (``worker_extension_cls``) where openrlhf is only on the path.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from openrlhf import platform
from openrlhf.engines.images import IMAGES_VARIABLE, process_images_without_torchvision
from openrlhf.engines.weight_sync.compare import Comparison, compare, stored_weights, visible_weights
from openrlhf.utils.process import die_with_parent

ENGINE_PID_VARIABLE = "OPENRLHF_ENGINE_PID"
"""Set by an engine actor to its process id; the vLLM processes below it die with their parents."""

_MODULE = "openrlhf.engines.weight_sync.gloo"
_NCCL_MODULE = "openrlhf.engines.weight_sync.nccl"


def register() -> None:
    """Register ``gloo`` with both of vLLM's factories, and a sender of ``nccl``; calling it again does nothing."""
    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", _MODULE, "GlooWeightTransferEngine")
    if "gloo" not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine("gloo", _MODULE, "GlooTrainerWeightTransferEngine")
    if "nccl_held_port" not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine("nccl_held_port", _NCCL_MODULE, "HeldPortTrainerEngine")
    if os.environ.get(ENGINE_PID_VARIABLE, str(os.getpid())) != str(os.getpid()):
        die_with_parent()
    if os.environ.get(IMAGES_VARIABLE):
        process_images_without_torchvision()


register()


def pack_again(model: nn.Module) -> None:
    """After a reload on a CPU: let the layers that the reload leaves out pack their weights anew.

    The CPU build multiplies with packed copies, made when the model was loaded. A head that is tied to the embedding
    gets no weights of its own, so the reload passes it over; experts are reloaded, and their packing is forgotten.
    Elsewhere nothing is packed.
    """
    if platform.device_type() != "cpu":
        return
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        experts = getattr(method, "moe_kernel", None)
        if experts is not None:
            experts.fused_experts.process_weights_after_loading(layer)
        elif isinstance(layer, ParallelLMHead):
            method.process_weights_after_loading(layer)


class WorkerExtension:
    """What is added to every vLLM worker, called with ``collective_rpc``."""

    def compare_weights(self, folder: str) -> Comparison:
        """Compare what this worker holds with the same weights read from files by vLLM's own loader.

        Afterwards it holds what the files say, which is the same when nothing differs.
        """
        runner = self.model_runner  # type: ignore[attr-defined]
        # On the CPU: next to the weights a GPU may have no room for another copy.
        held = {name: tensor.to("cpu", copy=True) for name, tensor in visible_weights(runner.model).items()}
        runner.reload_weights(weights_iterator=stored_weights(Path(folder)))
        pack_again(runner.model)
        return compare(held, visible_weights(runner.model))
