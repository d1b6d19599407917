"""The nccl transfer meets at a port that no other process can take between its choice and its use."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from openrlhf.engines.weight_sync import plugin, sender
from openrlhf.engines.weight_sync.nccl import HeldPortTrainerEngine
from openrlhf.utils.network import family_of


class Worker:
    """A vLLM worker; where it is told to go, somebody tries to bind it first."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}
        self.groups: list[StatelessProcessGroup] = []

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.told = info
        where = info["master_address"], info["master_port"]
        with socket.socket(family_of(where[0])) as other, pytest.raises(OSError, match="in use"):
            other.bind(where)
        self.groups.append(StatelessProcessGroup.create(*where, 1, 2, store_timeout=20))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_sender_keeps_its_port(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "node_address", lambda: address)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", lambda group, device: group)
    plugin.register()
    worker = Worker()
    info = sender._init_info("nccl", 0, 1, 1, 60.0)
    engine: Any = WeightTransferTrainerFactory.trainer_init(info, client=worker, source=[])  # type: ignore[arg-type]
    assert isinstance(engine, HeldPortTrainerEngine) and engine.is_sender and engine.packed
    assert worker.told["master_address"] == address
    assert worker.told["rank_offset"] == 1 and worker.told["world_size"] == 2
    assert worker.told["packed"] and worker.told["packed_buffer_size_bytes"] == sender.NCCL_BUFFER_BYTES
    group = engine.model_update_group
    assert (group.rank, group.world_size) == (0, 2)
    group.store.set("greeting", "hello")
    assert [joined.store.get("greeting") for joined in worker.groups] == [b"hello"]


def test_other_ranks_only_gather() -> None:
    plugin.register()
    info = sender._init_info("nccl", 1, 2, 1, 60.0)
    engine: Any = WeightTransferTrainerFactory.trainer_init(info, client=None, source=[])  # type: ignore[arg-type]
    assert isinstance(engine, HeldPortTrainerEngine) and not engine.is_sender and engine.model_update_group is None
