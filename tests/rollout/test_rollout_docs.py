"""The code and the commands of docs/rewards.md and docs/agents.md work."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path

import pytest
from rollout_helpers import EOS, LetterTokenizer, ScriptedEngine, item

from openrlhf.config import parse_cli
from openrlhf.rollout.episodes import EpisodeSpec, run_group
from openrlhf.rollout.loader import load_agent_executor
from openrlhf.rollout.protocol import SamplingParams
from openrlhf.rollout.rewards import FunctionReward, HTTPOptions, RewardRequest
from openrlhf.rollout.rewards.http import TOKEN_VARIABLE
from openrlhf.trainer.reward_servers import WAIT_SECONDS

ROOT = Path(__file__).resolve().parents[2]
REWARDS = (ROOT / "docs" / "rewards.md").read_text()
AGENTS = (ROOT / "docs" / "agents.md").read_text()
TOK = LetterTokenizer()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_reward_function(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(blocks(REWARDS, "python")[0])
    batch = [RewardRequest("2+2= 4", "2+2=", "4"), RewardRequest("2+4= 7", "2+4=", "4")]
    results = asyncio.run(FunctionReward.from_file(str(path)).score(batch))
    assert [r.reward for r in results] == [1.0, 0.0]


class ChatTokenizer(LetterTokenizer):
    letters = LetterTokenizer.letters + "UAT:"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: object) -> str:
        return "".join(f"{m['role'][0].upper()}:{m['content']}<eos>\n" for m in messages) + "A:"


@pytest.mark.parametrize(("number", "reward", "turns"), [(0, 1.0, 2), (1, 0.0, 1), (2, 0.0, 1)])
def test_the_agents(tmp_path: Path, number: int, reward: float, turns: int) -> None:
    path = tmp_path / "agent.py"
    path.write_text(blocks(AGENTS, "python")[number])
    spec = EpisodeSpec(
        sampling=SamplingParams(logprobs=True),
        max_length=64,
        tokenizer=ChatTokenizer(),
        executor=load_agent_executor(str(path)),
    )
    engine = ScriptedEngine([[*TOK.encode("5"), EOS], [*TOK.encode("4"), EOS]])
    trajectory = asyncio.run(run_group(item(TOK, "2+2=", label="4"), 1, engine, spec)).trajectories[0]
    assert (trajectory.reward, len(engine.prompts)) == (reward, turns)


@pytest.mark.parametrize("text", [REWARDS, AGENTS])
def test_the_commands_parse(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands = [
        shlex.split(line)
        for block in blocks(text, "")
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("openrlhf ")
    ]
    assert commands
    for command in commands:
        config = parse_cli(command[1], command[2:])
        assert config.label_key in ("answer", "number")


def test_the_numbers() -> None:
    options = HTTPOptions()
    for number in (options.max_tries, int(options.timeout), options.max_connections, options.batch_size):
        assert re.search(rf"\b{number}\b", REWARDS), number
    assert f"{WAIT_SECONDS:g} s are waited for a server" in REWARDS
    assert TOKEN_VARIABLE in REWARDS
