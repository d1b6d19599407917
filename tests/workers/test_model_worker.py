"""What every role of train_ppo_ray does before its model is there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from openrlhf.cluster.group import NESTED_SECONDS, PendingCall, WorkerGroup
from openrlhf.config import PPOConfig
from openrlhf.utils.errors import ExplainedError
from openrlhf.workers import deepspeed_engine, model_worker
from openrlhf.workers.deepspeed_engine import TrainEngine
from openrlhf.workers.model_worker import ROLE_WORKERS, PolicyWorker, form_groups


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    """What --full_determinism sets is a process's, not a test's."""
    with mock.patch.dict(os.environ), torch.random.fork_rng(devices=[]):
        yield
        torch.use_deterministic_algorithms(False)


def drawn(role: str, cfg: PPOConfig) -> Any:
    """What a role draws while it makes new weights, in a process whose generators stand anywhere."""
    kind = ROLE_WORKERS[role]
    worker = kind.__new__(kind)
    with mock.patch.object(kind, "_build", lambda *_: torch.rand(4)):
        torch.seed()
        worker.load(cfg, 1)
    return worker.engine


@pytest.mark.parametrize("role", ROLE_WORKERS)
def test_new_weights_follow_from_the_seed(role: str) -> None:
    cfg = replace(PPOConfig(), seed=7)
    assert torch.equal(drawn(role, cfg), torch.rand(4, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(drawn(role, cfg), drawn(role, cfg))
    assert not torch.equal(drawn(role, cfg), drawn(role, replace(cfg, seed=8)))
    assert not torch.are_deterministic_algorithms_enabled()


def test_full_determinism_reaches_the_models() -> None:
    drawn("actor", replace(PPOConfig(), full_determinism=True))
    assert torch.are_deterministic_algorithms_enabled()


def test_the_tokenizer_is_read_where_it_is_saved_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr("openrlhf.models.loading.load_tokenizer", lambda path, use_fast: read.append(path) or "it")
    saved: list[Any] = []
    engine = SimpleNamespace(save_hf=lambda *given: saved.append(given), save_checkpoint=lambda *given: None)
    for rank in range(2):
        worker = PolicyWorker.__new__(PolicyWorker)
        worker.rank, worker.cfg, worker.engine = rank, replace(PPOConfig(), pretrain="model"), engine  # type: ignore[assignment]
        for _ in range(2):
            worker.save_checkpoint({}, "folder", "tag", None, 1.0)
        worker.save_hf("folder")
    assert saved == [("folder", "it"), ("folder", None)] and read == ["model"]


def test_nothing_starts_threads_before_a_process_knows_how_many() -> None:
    """OpenMP reads OMP_NUM_THREADS when torch is imported; Ray imports this module before the class is made."""
    code = "import sys, openrlhf.workers.model_worker; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_threads_are_a_share_of_the_cores_or_what_the_user_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray gives a process that books less than a core one thread."""
    monkeypatch.setattr(model_worker, "redirect_output", lambda path: None)
    monkeypatch.setattr(model_worker, "available_cores", lambda: 12)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for sharers, threads in ((None, "1"), (5, "2"), (20, "1")):
        ROLE_WORKERS["actor"]("actor", 0, 1, str(tmp_path / "log"), None, sharers)
        assert os.environ["OMP_NUM_THREADS"] == threads


def test_a_collective_outlasts_a_wait_of_one_rank_for_an_engine() -> None:
    """The other ranks wait for it meanwhile, and must not be what ends the run."""
    joins: list[tuple[Any, ...]] = []

    class Group(WorkerGroup):
        def submit_first(self, method: str, *args: Any) -> PendingCall:
            return SimpleNamespace(method=method)  # type: ignore[return-value]

        def submit(self, method: str, *args: Any, per_rank: Any = None) -> PendingCall:
            joins.append((method, *args))
            return PendingCall(method, {})

    with mock.patch.object(PendingCall, "results", lambda calls, timeout: [[("host", 7)] for _ in calls]):
        form_groups([Group("actor", [], 70.0), Group("critic", [], 80.0)], 30.0)
    assert joins == [("join", "host", 7, 30.0, limit + NESTED_SECONDS) for limit in (70.0, 80.0)]


class CountedWeights:
    """Weights that say where they are, in the place of an engine's frozen ones."""

    def __init__(self) -> None:
        self.moves = ""

    def to_device(self) -> None:
        self.moves += "<"

    def to_cpu(self) -> None:
        self.moves += ">"


def test_offloaded_weights_come_once_for_all_micro_batches_of_a_call() -> None:
    engine: Any = TrainEngine.__new__(TrainEngine)
    weights = CountedWeights()
    engine.module, engine._engine, engine._frozen, engine.param_offload = torch.nn.Identity(), None, weights, True
    engine._asleep = engine._weights_are_here = False
    worker: Any = ROLE_WORKERS["ref"].__new__(ROLE_WORKERS["ref"])
    worker.engine, worker.cfg = engine, PPOConfig()
    worker.backoff = SimpleNamespace(forward=lambda batch, run: run(batch))
    worker._forward_one = engine
    outputs = worker.forward([torch.ones(2), torch.zeros(3), torch.ones(1)])
    assert [len(output) for output in outputs] == [2, 3, 1] and weights.moves == "<>"
    engine(torch.ones(1))
    assert weights.moves == "<><>"
    with pytest.raises(TypeError), engine.weights_on_device():
        engine(1, 2, no=3)
        raise TypeError
    assert weights.moves == "<><><>", "also after an error"
    engine._frozen = None
    worker.forward([torch.ones(2)])


def test_what_a_checkpoint_says_of_the_run_comes_from_one_rank() -> None:
    """With finished groups that wait it may be gigabytes, which the driver would get from every rank."""
    for rank, answer in ((0, {"buffer": "groups"}), (1, {})):
        worker = PolicyWorker.__new__(PolicyWorker)
        worker.rank = rank
        worker.engine = mock.Mock(**{"load_checkpoint.return_value": {"buffer": "groups"}})
        assert worker.load_checkpoint("folder", "tag") == answer
        worker.engine.load_checkpoint.assert_called_once_with("folder", "tag")


def test_a_number_format_without_kernels_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_engine.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(deepspeed_engine, "on_gpu", lambda: False)
    with pytest.raises(ExplainedError, match="fp16 does not run on a CPU; use fp32 or bf16"):
        TrainEngine(torch.nn.Linear(1, 1), replace(PPOConfig(), param_dtype="fp16"), None)
