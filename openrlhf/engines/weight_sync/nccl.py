"""The sending half of vLLM's ``nccl`` transport, with a port that stays ours from the choice of it to its use."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient, WeightSource
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
from vllm.utils.nccl import unpinned_nccl_env

from openrlhf.utils.network import family_of


@dataclass
class HeldPortInitInfo(NCCLTrainerInitInfo):
    """As vLLM's; the system chooses the port."""

    backend: ClassVar[str] = "nccl_held_port"

    master_port: int = 0
    world_size: int = 0


class HeldPortTrainerEngine(NCCLTrainerWeightTransferEngine):
    """As vLLM's, which is told a port and binds it later, when another process may have it."""

    init_info_cls = HeldPortInitInfo

    @classmethod
    def trainer_init(
        cls, init_info: NCCLTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> HeldPortTrainerEngine:
        """Meet the engines' workers."""
        if not init_info.is_sender:
            return super().trainer_init(init_info, client=client, source=source)
        if source is None:
            raise ValueError("the nccl weight transfer needs a weight source")
        wire = {
            "packed": init_info.packed,
            "packed_buffer_size_bytes": init_info.packed_buffer_size_bytes,
            "packed_num_buffers": init_info.packed_num_buffers,
        }
        engine = cls(client=client, source=source, is_sender=True, **wire)
        host = init_info.master_address
        listening = socket.create_server((host, 0), family=family_of(host))
        for_workers = NCCLWeightTransferInitInfo(
            master_address=host,
            master_port=listening.getsockname()[1],
            rank_offset=1,
            world_size=init_info.world_size,
            **wire,
        )
        # Neither side returns before the other has come.
        with ThreadPoolExecutor(max_workers=1) as pool:
            joined = pool.submit(client.init_weight_transfer_engine, worker_init_payload(for_workers))
            engine.model_update_group = _communicator(for_workers, listening)
            joined.result()
        return engine


def _communicator(info: NCCLWeightTransferInitInfo, listening: socket.socket) -> pynccl.PyNcclCommunicator:
    assert info.master_address is not None and info.master_port is not None
    group = StatelessProcessGroup.create(
        info.master_address, info.master_port, 0, info.world_size, listen_socket=listening
    )
    with unpinned_nccl_env():
        return pynccl.PyNcclCommunicator(group, device=torch.accelerator.current_device_index())
