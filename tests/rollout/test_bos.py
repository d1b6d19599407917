"""A text that begins a sequence has the same ids however the episode is played, with BOS once where the run has one."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from rollout_helpers import EOS, LetterTokenizer, ScriptedEngine

from openrlhf.rollout.agents import AgentInstanceBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor
from openrlhf.rollout.episodes import EpisodeSpec, run_group
from openrlhf.rollout.group import PromptItem
from openrlhf.rollout.openai_agent import OpenAIAgentExecutor
from openrlhf.rollout.protocol import SamplingParams
from openrlhf.utils.first_ids import first_ids, last_ids

BOS = 8
"""Of the letters' tokens this one reads "<ans>"."""


class BosTokenizer(LetterTokenizer):
    """Puts BOS before a text by itself, as those of Llama and Gemma do."""

    bos_token_id = BOS

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([BOS] if add_special_tokens else []), *super().encode(text)]

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return "".join(message["content"] for message in messages)


TOK = BosTokenizer()


def plain(text: str) -> list[int]:
    return TOK.encode(text, add_special_tokens=False)


def environment(prefix: str) -> type[AgentInstanceBase]:
    class Environment(AgentInstanceBase):
        async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return {"observation": prefix + states["observation"]}

        async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return {"rewards": 1.0, "environment_feedback": "", "done": True}

    return Environment


class Client(OpenAIAgentExecutor):
    """Sends the prompt behind `prefix`, to be completed or as a chat."""

    def __init__(self, prefix: str, chat: bool = False) -> None:
        super().__init__()
        self.prefix, self.chat = prefix, chat

    async def run(self, base_url: str, prompt: str, label: Any) -> float:
        text, path = self.prefix + prompt, "/chat/completions" if self.chat else "/completions"
        body = {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        async with aiohttp.ClientSession() as client, client.post(base_url + path, json=body) as reply:
            assert reply.status == 200, await reply.text()
        return 1.0


def asked(executor: Any, prompt: list[int], text: str = "ab") -> list[int]:
    """What the engine is asked to continue, 4 tokens of at most 12, in an episode of a prompt."""
    engine = ScriptedEngine([[EOS]])
    spec = EpisodeSpec(sampling=SamplingParams(max_tokens=4), max_length=12, tokenizer=TOK, executor=executor)

    async def run() -> None:
        try:
            await run_group(PromptItem(0, 0, text, prompt, ""), 1, engine, spec)
        finally:
            if isinstance(executor, OpenAIAgentExecutor):
                await executor.close()

    asyncio.run(run())
    return engine.prompts[0]


@pytest.mark.parametrize("start", [[BOS], []], ids=["with BOS", "a template without BOS"])
def test_prompts_of_all_agents_begin_alike(start: list[int]) -> None:
    prompt = start + plain("ab")
    unchanged = [None, SingleTurnAgentExecutor(), MultiTurnAgentExecutor(environment("")), Client(""), Client("", True)]
    for executor in unchanged:
        assert asked(executor, prompt) == prompt, executor
    for executor in (MultiTurnAgentExecutor(environment("x")), Client("x")):
        assert asked(executor, prompt) == start + plain("xab"), executor


def test_no_second_bos() -> None:
    assert asked(MultiTurnAgentExecutor(environment("<ans>x")), [BOS, *plain("ab")]) == plain("<ans>xab")
    assert asked(Client("<ans>x"), [BOS, *plain("ab")]) == plain("<ans>xab")


def test_chats_have_what_their_template_writes() -> None:
    assert asked(Client("x", True), [BOS, *plain("ab")]) == plain("xab")
    assert asked(Client("<ans>x", True), [BOS, *plain("ab")]) == plain("<ans>xab")


def test_what_is_cut_keeps_bos() -> None:
    executor = MultiTurnAgentExecutor(environment("0123456789"))
    assert asked(executor, [BOS, *plain("ab")]) == [BOS, *plain("456789ab")]  # ab is one token
    assert asked(executor, plain("ab")) == plain("3456789ab")


def test_a_prompt_that_was_cut_is_the_same_for_clients() -> None:
    assert asked(Client(""), [BOS, *plain("b")]) == [BOS, *plain("b")]


@pytest.mark.parametrize(
    "limit, kept", [(9, [BOS, 1, 2, 3]), (4, [BOS, 1, 2, 3]), (3, [BOS, 2, 3]), (2, [BOS, 3]), (1, [BOS]), (0, [])]
)
def test_last_ids(limit: int, kept: list[int]) -> None:
    assert last_ids(TOK, [BOS, 1, 2, 3], limit) == kept
    assert last_ids(TOK, [5, 1, 2, 3], limit) == [5, 1, 2, 3][max(0, 4 - limit) :]
    assert last_ids(LetterTokenizer(), [BOS, 1, 2, 3], limit) == [BOS, 1, 2, 3][max(0, 4 - limit) :]


def test_without_another_prompt_the_tokenizer_decides() -> None:
    assert first_ids(TOK, "xy") == [BOS, *plain("xy")]
    assert first_ids(TOK, "<ans>xy") == [BOS, *plain("xy")]
    assert first_ids(TOK, "") == [BOS]
    assert first_ids(LetterTokenizer(), "xy") == plain("xy")
