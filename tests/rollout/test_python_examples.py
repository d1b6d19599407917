"""The files under examples/python do what they say, called as 0.9.x calls them and as we do."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ports import unused_port
from rollout_helpers import EOS, LetterTokenizer, ScriptedEngine, item

from openrlhf.rollout.episodes import EpisodeSpec, run_group
from openrlhf.rollout.errors import RewardError
from openrlhf.rollout.loader import load_agent_executor
from openrlhf.rollout.protocol import SamplingParams
from openrlhf.rollout.rewards import FunctionReward, HTTPOptions, HTTPReward, RewardRequest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"


def requests() -> list[RewardRequest]:
    return [
        RewardRequest("3+4=7", "3+4=", "7", sample="first"),
        RewardRequest("3+4= it is 8", "3+4=", 7, sample="second"),
        RewardRequest("3+4=?", "3+4=", 7.0, sample="third"),
    ]


def test_reward_func() -> None:
    reward = FunctionReward.from_file(str(EXAMPLES / "reward_func.py"))
    results = asyncio.run(reward.score(requests()))
    assert [r.reward for r in results] == [1.0, 0.0, 0.0]
    assert [r.extra_logs["answered"] for r in results] == [1.0, 1.0, 0.0]
    single = reward._function(["3+4=7"], ["3+4="], ["7"])  # one sample per call: one-element tensors
    assert all(value.shape == torch.Size([1]) for value in (single["rewards"], single["scores"]))


def test_math_reward_func() -> None:
    reward = FunctionReward.from_file(str(EXAMPLES / "math_reward_func.py"))
    batch = [
        RewardRequest(r"p \boxed{\frac{2}{4}}", "p", "0.5"),
        RewardRequest(r"p \boxed{3}", "p", "4"),
        RewardRequest("p nothing", "p", "4"),
    ]
    results = asyncio.run(reward.score(batch))
    assert [(r.reward, r.score) for r in results] == [(1.0, 1.0), (0.1, 0.0), (0.0, 0.0)]


def test_agent_func() -> None:
    class Wide(LetterTokenizer):
        letters = LetterTokenizer.letters + "HLRS"

    tokenizer = Wide()
    executor = load_agent_executor(str(EXAMPLES / "agent_func.py"))
    engine = ScriptedEngine([(tokenizer.encode(text), "stop") for text in ("4", "no", "9", "7")])
    spec = EpisodeSpec(sampling=SamplingParams(), max_length=200, tokenizer=tokenizer, executor=executor)
    group = asyncio.run(run_group(item(tokenizer, "guess? ", label="7"), 1, engine, spec))
    trajectory = group.trajectories[0]
    assert trajectory.metadata["response"] == "4\nHigher.\nno\nSay a number.\n9\nLower.\n7\nRight!"
    assert (trajectory.reward, trajectory.score, trajectory.extra_logs) == (1.0, 1.0, {"turns": 4.0})
    assert tokenizer.decode(trajectory.token_ids[trajectory.action_mask].tolist()) == "4no97"


@pytest.mark.parametrize(
    ("replies", "reward", "score", "attempts"),
    [(["7"], 1.0, 1.0, 1), (["5", "7"], 0.5, 1.0, 2), (["5", "6"], 0.0, 0.0, 2)],
)
def test_openai_agent_func(replies: list[str], reward: float, score: float, attempts: int) -> None:
    class Chat(LetterTokenizer):
        letters = LetterTokenizer.letters + "UAT:"

        def apply_chat_template(self, messages: list[dict[str, str]], **options: object) -> str:
            return "".join(f"{m['role'][0].upper()}:{m['content']}<eos>\n" for m in messages) + "A:"

    tokenizer = Chat()
    executor = load_agent_executor(str(EXAMPLES / "openai_agent_func.py"))
    engine = ScriptedEngine([[*tokenizer.encode(text), EOS] for text in replies])
    spec = EpisodeSpec(sampling=SamplingParams(), max_length=200, tokenizer=tokenizer, executor=executor)
    group = asyncio.run(run_group(item(tokenizer, "3+4=?", label=7), 1, engine, spec))
    trajectory = group.trajectories[0]
    assert (trajectory.reward, trajectory.score) == (reward, score)
    assert trajectory.extra_logs == {"attempts": attempts, "conversations": 1.0}


@contextmanager
def server(port: int, token: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "reward_server.py"), "--port", str(port)],
        env={**os.environ, "OPENRLHF_REWARD_TOKEN": token},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            found = re.search(r"running on http://127.0.0.1:(\d+)", line)
            if found:
                break
        else:
            raise AssertionError("the server ended early")
        yield process, int(found.group(1))
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.slow
def test_reward_server_and_its_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENRLHF_REWARD_TOKEN", "s3cret")

    async def score(url: str) -> list[float]:
        reward = HTTPReward([url], HTTPOptions(first_wait=0.2, max_wait=1.0, max_tries=60))
        try:
            return [result.reward for result in await reward.score(requests())]
        finally:
            await reward.close()

    async def score_while_restarting(url: str, port: int) -> list[float]:
        waiting = asyncio.ensure_future(score(url))
        await asyncio.sleep(0.5)  # the first tries meet a closed port
        with server(port, "s3cret"):
            return await waiting

    with server(unused_port(), "s3cret") as (process, port):
        url = f"http://127.0.0.1:{port}/get_reward"
        assert asyncio.run(score(url)) == [1.0, 0.0, 0.0]
        monkeypatch.setenv("OPENRLHF_REWARD_TOKEN", "other")
        with pytest.raises(RewardError, match="status 401: .*wrong or no bearer token") as caught:
            asyncio.run(score(url))
        assert "other" not in str(caught.value)
        monkeypatch.setenv("OPENRLHF_REWARD_TOKEN", "s3cret")
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert asyncio.run(score_while_restarting(url, port)) == [1.0, 0.0, 0.0]
