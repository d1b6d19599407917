"""The server as a process: scores, many clients, limits, signals, workers."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from serve_helpers import ServerProcess, make_reward_model, reference_score, running

from openrlhf.cli.serve_rm import main
from openrlhf.config import ServeRMConfig
from openrlhf.rollout.rewards import HTTPOptions, HTTPReward, RewardRequest
from openrlhf.rollout.rewards.http import TOKEN_VARIABLE
from openrlhf.tools.scoring import RewardScorer

pytestmark = pytest.mark.e2e
# Kernels for other shapes add in another order: float32 rounding of a few layers.
CLOSE = 3e-6
TEXTS = [f"{n}+{n * 7 % 13}={'1' * (n % 23)} done" for n in range(200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_reward_model(tmp_path_factory.mktemp("rm") / "rm", mean=0.25, std=2.0)


def load(path: str, packing: bool = False, normalize: bool = False, max_len: int = 2048) -> RewardScorer:
    cfg = ServeRMConfig(param_dtype="fp32", packing_samples=packing, max_len=max_len)
    return RewardScorer.load(path, cfg, torch.device("cpu"), normalize)


class TestScorer:
    @pytest.mark.parametrize("packing", [False, True])
    def test_scores_are_those_of_transformers_whatever_the_batch(self, model: str, packing: bool) -> None:
        scorer = load(model, packing)
        sequences = [scorer.encode(text).token_ids for text in TEXTS[:24]]
        alone = [scorer.score([ids])[0] for ids in sequences]
        assert scorer.score(sequences) == pytest.approx(alone, abs=CLOSE)
        assert scorer.score(sequences[::-1])[::-1] == pytest.approx(alone, abs=CLOSE)
        assert alone[:3] == pytest.approx([reference_score(model, text) for text in TEXTS[:3]], abs=CLOSE)
        assert max(alone) - min(alone) > 0.1

    def test_the_end_token_is_there_once(self, model: str) -> None:
        scorer = load(model)
        plain = scorer.encode("1+1=2")
        assert plain.token_ids[-1] == scorer.tokenizer.eos_token_id and len(plain.token_ids) == 6
        for text in ("1+1=2<eos>", "1+1=2<eos><eos><pad>", "<pad><pad>1+1=2<eos>", "1+1=2<pad>"):
            assert scorer.encode(text) == plain
        assert scorer.encode("").token_ids == scorer.encode("<eos>").token_ids == [scorer.tokenizer.eos_token_id]

    def test_long_texts_are_cut_and_end_with_the_end_token(self, model: str) -> None:
        scorer = load(model, max_len=4)
        end = scorer.tokenizer.eos_token_id
        full = load(model).encode("12345").token_ids
        assert scorer.encode("12345") == ([*full[:3], end], True)
        assert scorer.encode("123") == ([*full[:3], end], False)
        scorer.tokenizer.truncation_side = "left"
        assert scorer.encode("12345") == ([*full[2:5], end], True)

    def test_normalized(self, model: str) -> None:
        plain, scorer = load(model), load(model, normalize=True)
        ids = plain.encode("1+1=2").token_ids
        assert scorer.score([ids])[0] == pytest.approx((plain.score([ids])[0] - 0.25) / 2.0, abs=CLOSE)

    def test_a_head_of_another_name(self, tmp_path: Path, model: str) -> None:
        other = make_reward_model(tmp_path / "rm", prefix="value_head")
        ids = load(model).encode("1+1=2").token_ids
        assert load(other).score([ids]) == pytest.approx(load(model).score([ids]), abs=CLOSE)


@pytest.mark.parametrize("packing", [[], ["--packing_samples"]])
def test_many_clients_get_the_scores_of_single_requests(model: str, packing: list[str]) -> None:
    """And requests in flight finish after SIGTERM."""
    scorer = load(model)
    expected = [scorer.score([scorer.encode(text).token_ids])[0] for text in TEXTS]
    with running(model, "--batch_size", "16", *packing) as server, ThreadPoolExecutor(200) as clients:
        replies = list(clients.map(lambda text: server.post({"query": [text]}), TEXTS))
        assert [status for status, _ in replies] == [200] * 200
        assert [reply["rewards"][0] for _, reply in replies] == pytest.approx(expected, abs=CLOSE)
        # Requests that came together were scored together.
        assert float(figures(server)["rm_batch_texts_count"]) < 200
        status, reply = server.post({"query": TEXTS, "prompts": [""] * 200, "labels": [0] * 200})
        assert status == 200 and reply["scores"] == pytest.approx(expected, abs=CLOSE)
        lines = figures(server)
        assert float(lines['rm_requests_total{status="200"}']) == 201
        assert float(lines["rm_texts_total"]) == 400
        stop_while_it_answers(server)


def figures(server: ServerProcess) -> dict[str, str]:
    """What the server tells of itself, by name."""
    return dict(line.rsplit(" ", 1) for line in server.get("/metrics")[1].decode().splitlines() if line[0] != "#")


def test_limits_and_token(model: str) -> None:
    flags = ["--queue_size", "4", "--max_body_mib", "1", "--max_len", "8", "--normalize_reward"]
    with running(model, *flags, token="open sesame") as server:
        token = {"Authorization": "Bearer open sesame"}
        status, reply = server.post({"query": ["1+1=2", "1+1=3456789"]}, token)
        scorer = load(model, normalize=True, max_len=8)
        expected = [scorer.score([scorer.encode(text).token_ids])[0] for text in ("1+1=2", "1+1=3456789")]
        assert status == 200 and reply["rewards"] == pytest.approx(expected, abs=CLOSE)
        assert server.post({"query": ["1"]})[0] == 401
        assert server.post({"query": ["1"] * 5}, token)[0] == 413
        assert server.post(b" " * (3 << 20), token)[0] == 413
        status, reply = server.post({"query": [1]}, token)
        assert status == 422 and "query[0] is a JSON number" in reply["error"]


def test_the_reward_client_survives_a_restart(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "open sesame")
    batch = [RewardRequest(text, text[:3], "label") for text in TEXTS]
    scorer = load(model)
    expected = [scorer.score([scorer.encode(text).token_ids])[0] for text in TEXTS]

    killed = threading.Event()

    async def score(url: str) -> list[list[float]]:
        """Again and again until the server was killed: however fast it is, it is killed at work, or just before."""
        # Tries for some minutes: a busy machine takes its time to start a server.
        client = HTTPReward([url], HTTPOptions(batch_size=1, max_tries=60, first_wait=0.5, max_wait=3.0))
        rounds = []
        try:
            while True:
                last = killed.is_set()
                rounds.append([result.reward for result in await client.score(batch)])
                if last:
                    return rounds
        finally:
            await client.close()

    with ThreadPoolExecutor(1) as thread:
        with running(model, "--batch_size", "1", token="open sesame") as server:
            url, port = f"{server.url}/get_reward", server.port
            scores = thread.submit(asyncio.run, score(url))
            while b'{status="200"}' not in server.get("/metrics")[1] and not scores.done():
                time.sleep(0.002)
            assert not scores.done(), scores.result()
            server.stop(signal.SIGKILL)
            killed.set()
        # The same port again at once, though connections of the dead server linger.
        with running(model, port=port, token="open sesame"):
            for rewards in scores.result(timeout=400):
                assert rewards == pytest.approx(expected, abs=CLOSE)


def stop_while_it_answers(server: ServerProcess) -> None:
    """SIGTERM between a request and its answer: the answer comes, and then the end."""
    body = json.dumps({"query": TEXTS * 4}).encode()
    head = f"POST /get_reward HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", server.port), timeout=200) as client:
            client.sendall(head.encode() + body)
            if not seen_waiting(server, client):
                continue
            server.process.send_signal(signal.SIGTERM)
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        break
    else:
        pytest.fail("each of 100 requests was answered before the server was seen at work on it")
    assert answer.startswith(b"HTTP/1.1 200")
    assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["rewards"]) == len(TEXTS) * 4
    assert server.process.wait(60) == 0


def seen_waiting(server: ServerProcess, client: socket.socket) -> bool:
    """Whether texts were seen to wait before the answer came: on a busy machine it can come between two looks."""
    while not select.select([client], [], [], 0.002)[0]:
        if json.loads(server.get("/health")[1])["waiting"] > 0:
            return True
    return False


def test_workers_share_the_port_and_are_started_again(model: str) -> None:
    with running(model, "--workers", "2") as server:
        with ThreadPoolExecutor(16) as clients:
            replies = list(clients.map(lambda text: server.post({"query": [text]})[0], TEXTS))
        assert replies == [200] * 200

        def children() -> list[int]:
            running = []
            for process in psutil.Process(server.process.pid).children():
                with suppress(psutil.NoSuchProcess):  # it has ended meanwhile, or is a zombie
                    if any("spawn_main" in part for part in process.cmdline()):
                        running.append(process.pid)
            return running

        before = children()
        assert len(before) == 2
        # Any worker answers for both.
        counts = [line for line in server.get("/metrics")[1].decode().splitlines() if line.startswith("rm_texts_total")]
        assert counts == ["rm_texts_total 200.0"]
        os.kill(before[0], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while len(set(children()) - {before[0]}) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        after = children()
        assert len(after) == 2 and before[0] not in after
        # The other worker goes on meanwhile.
        assert server.post({"query": ["1+1=2"]})[0] == 200
        assert server.stop() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in after)


class TestStart:
    @staticmethod
    def failing(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
        """What a start in this process says that comes to nothing."""
        assert main(["--host", "127.0.0.1", *flags]) == 1
        return capsys.readouterr().err

    def test_a_model_without_a_head(self, model: str, capsys: pytest.CaptureFixture[str]) -> None:
        message = self.failing(capsys, "--reward_pretrain", f"{model}_base", "--port", "0")
        assert "has no weight score.weight" in message and "--value_head_prefix" in message

    def test_a_worker_that_cannot_load(self, model: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "openrlhf.cli.serve_rm", "--host", "127.0.0.1", "--port", "0"]
            + ["--reward_pretrain", f"{model}_base", "--workers", "2"],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert "has no weight score.weight" in done.stderr and "before it could serve" in done.stderr
        assert "serving" not in done.stderr and "starting it again" not in done.stderr

    def test_a_port_that_is_taken(self, model: str, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = str(other.getsockname()[1])
            message = self.failing(capsys, "--reward_pretrain", model, "--port", port)
        assert f"cannot listen on 127.0.0.1 port {port}" in message and "--port" in message

    def test_no_mean_and_std(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = make_reward_model(tmp_path / "rm")
        message = self.failing(capsys, "--reward_pretrain", path, "--port", "0", "--normalize_reward")
        assert "needs `mean` and `std`" in message
