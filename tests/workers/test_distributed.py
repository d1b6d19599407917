"""Joining the process group, and deadlines that name what is waited for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from ports import unused_port

from openrlhf.workers.distributed import DistributedError, any_rank, barrier, broadcast_object, init_distributed

ROOT = str(Path(__file__).parents[2])
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

ALONE = """
import os, socket
import torch.distributed as dist
from openrlhf.workers.distributed import init_distributed, shutdown
join = dist.init_process_group
def raced(*args, **options):  # another process wants the port just before it is used
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        except OSError:
            return join(*args, **options)
    raise AssertionError("the port is free")
dist.init_process_group = raced
world = init_distributed(timeout_s=300)
assert (world.rank, world.size, world.local_rank, world.is_first) == (0, 1, 0, True)
assert init_distributed() == world
shutdown()
assert not dist.is_initialized()
"""

TOGETHER = """
from datetime import timedelta
import torch.distributed as dist
from openrlhf.workers.distributed import *
world = init_distributed(timeout_s=300)
assert all_reduce_sum([world.rank, 0.5]) == [1.0, 1.0]
assert any_rank(world.rank == 1) and not any_rank(False)
assert broadcast_object({"from": world.rank}) == {"from": 0}
barrier("the meeting", timeout_s=300)
store = dist.distributed_c10d._get_default_store()
if world.rank == 1:  # late, not gone: that would be told as a closed connection, at once
    store.wait(["told"], timedelta(seconds=300))
else:
    try:
        barrier("a rank that does not come", timeout_s=1)
    except DistributedError as error:
        assert "a rank that does not come" in str(error) and "Timed out" in str(error), error
        print("told")
    store.set("told", "")
shutdown()
"""


def environment(**extra: str) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    return {**env, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", **extra}


def test_plain_python_is_a_group_of_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=environment(), capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr


def test_two_ranks() -> None:
    port = str(unused_port())
    running = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", TOGETHER],
            env=environment(
                RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = []
    try:
        for process in running:
            outputs.append(process.communicate(timeout=400))
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], outputs
    assert "told" in outputs[0][0]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "rank 1 of 2 could not join",
        ),
    ],
)
def test_broken_launcher_environment_is_explained(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], message: str
) -> None:
    for name in LAUNCHER:
        monkeypatch.setenv(name, "")  # so that what is set below ends with the test
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match=message):
        init_distributed(timeout_s=2)
    assert not dist.is_initialized()


def test_helpers_without_a_group() -> None:
    assert any_rank(True) and broadcast_object(3) == 3
    barrier("nobody")
    assert issubclass(DistributedError, RuntimeError)
