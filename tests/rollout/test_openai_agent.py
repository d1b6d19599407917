"""Agents that reach the policy through OpenAI's protocol, with the real client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from rollout_helpers import EOS, LetterTokenizer, ScriptedEngine, item, mark_beginnings

from openrlhf.rollout.episodes import EpisodeSpec, run_group
from openrlhf.rollout.errors import AgentError, EngineError
from openrlhf.rollout.group import Group
from openrlhf.rollout.openai_agent import _Conversation, _Session
from openrlhf.rollout.protocol import SamplingParams
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.utils.agent import OpenAIAgentExecutor


class ChatTokenizer(LetterTokenizer):
    """Letters with a template like ChatML: U:text<eos>\\nA:..."""

    letters = LetterTokenizer.letters + 'UAST:<>_/{}",'

    def apply_chat_template(self, messages: list[dict[str, Any]], tools: Any = None, **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        if messages[0]["role"] == "bad":
            raise ValueError("unknown role")
        text = "T:tools\n" if tools else ""
        text += "".join(f"{m['role'][0].upper()}:{self.written(m).strip()}<eos>\n" for m in messages)
        return text + "A:"

    def written(self, message: dict[str, Any]) -> str:
        calls = [f"<tool_call>{call['function']['name']}</tool_call>" for call in message.get("tool_calls") or ()]
        return (message["content"] or "") + "".join(calls)


TOK = ChatTokenizer()
A, B, AB = (TOK.ids[piece] for piece in ("a", "b", "ab"))
Play = Callable[[openai.AsyncOpenAI, str, Any], Awaitable[Any]]


class Executor(OpenAIAgentExecutor):
    def __init__(self, play: Play) -> None:
        super().__init__()
        self.play = play

    async def run(self, base_url: str, prompt: str, label: Any) -> dict[str, Any] | float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            return await self.play(client, prompt, label)


def episodes(play: Play, engine: ScriptedEngine, n: int = 1, **options: Any) -> Group:
    sampling = options.pop("sampling", SamplingParams(logprobs=True))
    executor = Executor(play)
    spec = EpisodeSpec(
        sampling=sampling,
        max_length=options.pop("max_length", 200),
        tokenizer=options.pop("tokenizer", TOK),
        executor=executor,
        **options,
    )

    async def run() -> Group:
        try:
            return await run_group(item(TOK, "hi", 4, label="gold"), n, engine, spec)
        finally:
            await executor.close()

    return asyncio.run(run())


def one(play: Play, engine: ScriptedEngine, **options: Any) -> Trajectory:
    return episodes(play, engine, **options).trajectories[0]


async def ask(client: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=messages, **options)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def two_turns(client: openai.AsyncOpenAI, prompt: str, label: Any) -> Any:
    first = await ask(client, [user(prompt)])
    assert first.choices[0].message.content == "ab" and first.choices[0].finish_reason == "stop"
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (len(TOK.encode("U:hi<eos>\nA:")), 3)
    second = await ask(client, [user(prompt), assistant("ab"), user("more")])
    return {"reward": 0.5, "scores": 0.0, "extra_logs": {"length": len(second.choices[0].message.content)}}


def test_what_is_new_goes_on_without_a_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    mark_beginnings(monkeypatch)
    start = TOK.encode("User: a")
    known = _Conversation(start, "User: a", [0.0] * len(start), [(0, 1)])
    session = _Session(None, 99, TOK, None, [known])
    assert session._continued("User: abb", set()) == (known, TOK.encode("bb")[1:])
    assert session._continued("other", set())[1] == TOK.encode("other")


def test_turns_continue_the_sampled_ids() -> None:
    engine = ScriptedEngine([[A, B, EOS], [B, EOS]])
    trajectory = one(two_turns, engine)
    start, middle = TOK.encode("U:hi<eos>\nA:"), TOK.encode("\nU:more<eos>\nA:")
    assert engine.prompts == [start, [*start, A, B, EOS, *middle]]
    assert trajectory.token_ids.tolist() == [*start, A, B, EOS, *middle, B, EOS]
    ranges = [(len(start), len(start) + 3), (len(trajectory.token_ids) - 2, len(trajectory.token_ids))]
    wanted = np.zeros(len(trajectory.token_ids), dtype=bool)
    for first, last in ranges:
        wanted[first:last] = True
    np.testing.assert_array_equal(trajectory.action_mask, wanted)
    assert trajectory.logprobs is not None
    np.testing.assert_allclose(trajectory.logprobs[wanted], [-0.5, -0.51, -0.52, -0.5, -0.51], rtol=1e-6)
    assert (trajectory.reward, trajectory.score) == (0.5, 0.0)
    assert trajectory.extra_logs == {"length": 1.0, "conversations": 1.0}
    assert "unsampled_action_ranges" not in trajectory.metadata and not trajectory.truncated


def test_a_reply_cut_by_the_limit_is_continued_too() -> None:
    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        reply = await ask(client, [user(prompt)], max_tokens=2)
        assert reply.choices[0].finish_reason == "length"
        await ask(client, [user(prompt), assistant("ab"), user("more")])
        return 1.0

    engine = ScriptedEngine([[A, B, B], [B, EOS]])
    trajectory = one(play, engine)
    assert engine.sampling[0].max_tokens == 2
    assert engine.prompts[1][: len(engine.prompts[0]) + 3] == [*engine.prompts[0], A, B, EOS]
    assert trajectory.response_length == 4 and trajectory.extra_logs["conversations"] == 1.0


@pytest.mark.parametrize("end", [B, EOS], ids=["stop string", "end token"])
def test_turns_continue_where_the_client_does_not_see_what_ended_the_reply(end: int) -> None:
    sampling = SamplingParams(stop=("b",))

    async def chat(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        reply = (await ask(client, [user(prompt)])).choices[0].message
        assert reply.content == "a"
        await ask(client, [user(prompt), assistant("a"), user("more")])
        return 1.0

    async def completions(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        assert (await client.completions.create(model="policy", prompt=prompt)).choices[0].text == "a"
        await client.completions.create(model="policy", prompt=f"{prompt}a so")
        return 1.0

    between = "\nU:more<eos>\nA:" if end == EOS else "<eos>\nU:more<eos>\nA:"
    for play, start, new in ((chat, "U:hi<eos>\nA:", between), (completions, "hi", " so")):
        engine = ScriptedEngine([([A, end], "stop"), ([B], "length")])
        trajectory = one(play, engine, sampling=sampling)
        assert trajectory.extra_logs == {"conversations": 1.0}
        assert trajectory.token_ids.tolist() == [*TOK.encode(start), A, end, *TOK.encode(new), B]
        assert trajectory.response_length == 3


def test_a_reply_that_the_client_went_on_with_starts_a_new_row() -> None:
    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        await ask(client, [user(prompt)])
        await ask(client, [user(prompt), assistant("ab"), user("more")])
        return 1.0

    engine = ScriptedEngine([([A, B], "stop"), [A, EOS]])
    assert one(play, engine, sampling=SamplingParams(stop=("b",))).extra_logs["conversations"] == 1.0
    engine = ScriptedEngine([([A, TOK.ids["c"]], "stop"), [A, EOS]])
    assert one(play, engine, sampling=SamplingParams(stop=("c",))).extra_logs["conversations"] == 2.0


def test_a_client_that_asks_again_after_an_empty_reply_gets_a_new_row() -> None:
    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        for wanted in ("", "a"):
            assert (await client.completions.create(model="policy", prompt=prompt)).choices[0].text == wanted
        return 1.0

    engine = ScriptedEngine([[EOS], [A, EOS]])
    assert one(play, engine).extra_logs["conversations"] == 2.0
    assert engine.prompts == [TOK.encode("hi")] * 2


def test_plain_completions_tools_and_content_parts() -> None:
    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        reply = await client.completions.create(model="policy", prompt="hi", stop="b")
        assert reply.choices[0].text == "a"
        await client.completions.create(model="policy", prompt="hiab so", stop=["x", "y"])
        return float(label == "gold")

    engine = ScriptedEngine([([A, B], "stop"), [B, EOS]])
    assert one(play, engine).reward == 1.0
    assert engine.prompts[1] == [*TOK.encode("hi"), A, B, *TOK.encode(" so")]
    assert [s.stop for s in engine.sampling] == [("b",), ("x", "y")]

    async def play_tools(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        tool = {"type": "function", "function": {"name": "f"}}
        await ask(client, [{"role": "user", "content": parts}], tools=[tool])
        return 1.0

    engine = ScriptedEngine([[A, EOS]])
    one(play_tools, engine)
    assert engine.prompts == [TOK.encode("T:tools\nU:hi<eos>\nA:")]


def test_streams_have_the_text_the_reason_and_the_usage() -> None:
    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await ask(client, [user(prompt)], **options)]
        deltas = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
        assert "".join(filter(None, deltas)) == "ab" and chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices] == [None, "stop"]
        assert chunks[-1].usage.completion_tokens == 3
        history = [user(prompt), assistant("ab"), user("more")]
        async with client.chat.completions.stream(model="policy", messages=history) as stream:
            assert (await stream.get_final_completion()).choices[0].message.content == "b"
        pieces = [c async for c in await client.completions.create(model="policy", prompt="hi", stream=True)]
        assert "".join(piece.choices[0].text for piece in pieces) == "a"
        with pytest.raises(openai.BadRequestError, match="template refuses"):
            await ask(client, [{"role": "bad", "content": "x"}], stream=True)
        return 1.0

    engine = ScriptedEngine([[A, B, EOS], [B, EOS], [A, EOS]])
    assert one(play, engine).extra_logs["conversations"] == 2.0
    assert engine.prompts[1][: len(engine.prompts[0]) + 3] == [*engine.prompts[0], A, B, EOS]


def letter_by_letter(text: str) -> list[int]:
    """Ids that encoding the text would not give: "ab" as two tokens."""
    return [*(TOK.ids[letter] for letter in text), EOS]


async def tool_loop(client: openai.AsyncOpenAI, question: str, tools: dict[str, Any], stream: bool) -> str:
    """What agent frameworks do: ask, run the tools that the reply calls, send their results, until none is called."""
    specifications: Any = [{"type": "function", "function": {"name": name}} for name in tools]
    messages: list[Any] = [user(question)]
    while True:
        if stream:
            async with client.chat.completions.stream(model="m", messages=messages, tools=specifications) as events:
                reply = (await events.get_final_completion()).choices[0]
        else:
            reply = (await ask(client, messages, tools=specifications)).choices[0]
        if not reply.message.tool_calls:
            return reply.message.content or ""
        assert reply.finish_reason == "tool_calls"
        calls = [
            (call.id, call.function.name, json.loads(call.function.arguments)) for call in reply.message.tool_calls
        ]
        # As frameworks keep a reply: their own objects, written out anew.
        written = [
            {"id": key, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments, indent=1)}}
            for key, name, arguments in calls
        ]
        messages.append({"role": "assistant", "content": reply.message.content or "", "tool_calls": written})
        for key, name, arguments in calls:
            messages.append({"role": "tool", "tool_call_id": key, "content": tools[name](**arguments)})


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_trains_on_the_sampled_ids_and_masks_the_results(stream: bool) -> None:
    first = 'so: <tool_call> {"name":"tab","arguments":{"x":  1}}</tool_call>\n<tool_call>{"name": "now"}</tool_call>'
    replies = [letter_by_letter(text) for text in (first, '<tool_call>{"name": "now"} </tool_call>', "abba")]

    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        tools = {"tab": lambda x: f"tab is {x + 1}", "now": lambda: "ab o"}
        return float(await tool_loop(client, prompt, tools, stream) == "abba")

    engine = ScriptedEngine(replies)
    trajectory = one(play, engine, max_length=400)
    assert trajectory.reward == 1.0 and trajectory.extra_logs == {"conversations": 1.0}
    given = ["T:tools\nU:hi<eos>\nA:", "\nT:tab is 2<eos>\nT:ab o<eos>\nA:", "\nT:ab o<eos>\nA:"]
    ids: list[int] = []
    mask: list[bool] = []
    for text, sampled in zip(given, replies, strict=True):
        ids += TOK.encode(text)
        mask += [False] * len(TOK.encode(text))
        assert engine.prompts.pop(0) == ids
        ids += sampled
        mask += [True] * len(sampled)
    assert trajectory.token_ids.tolist() == ids
    assert trajectory.action_mask.tolist() == mask
    assert trajectory.logprobs is not None
    wanted = [-0.5 - 0.01 * i for sampled in replies for i in range(len(sampled))]
    np.testing.assert_allclose(trajectory.logprobs[trajectory.action_mask], wanted, rtol=1e-6)


@pytest.mark.parametrize("text", ['<tool_call>{"name": </tool_call>', "<tool_call>1</tool_call>", "<tool_call>{}"])
def test_broken_tool_calls_stay_text(text: str) -> None:
    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        return float(await tool_loop(client, prompt, {"now": str}, False) == text)

    assert one(play, ScriptedEngine([letter_by_letter(text)])).reward == 1.0


def test_a_tool_call_that_the_client_changed_starts_a_new_row() -> None:
    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        tool: Any = {"type": "function", "function": {"name": "now"}}
        message = (await ask(client, [user(prompt)], tools=[tool])).choices[0].message.model_dump()
        message["tool_calls"][0]["function"]["name"] = "other"
        await ask(client, [user(prompt), message], tools=[tool])
        return 1.0

    engine = ScriptedEngine([letter_by_letter('<tool_call>{"name": "now"}</tool_call>'), [A, EOS]])
    assert one(play, engine).extra_logs["conversations"] == 2.0


class ArgumentsTokenizer(ChatTokenizer):
    """Writes the arguments of calls as most templates do, of which JSON makes a quoted text where they are a text."""

    def written(self, message: dict[str, Any]) -> str:
        calls = [json.dumps(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        return (message["content"] or "") + "".join(calls)


def test_calls_of_the_history_reach_the_template_as_objects() -> None:
    function = {"name": "now", "arguments": '{"x":1}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    tokenizer = ArgumentsTokenizer()

    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        await ask(client, [user(prompt), call, {"role": "tool", "tool_call_id": "c", "content": "ab"}])
        return 1.0

    engine = ScriptedEngine([[A, EOS]])
    one(play, engine, tokenizer=tokenizer)
    assert engine.prompts[0] == tokenizer.encode('U:hi<eos>\nA:{"x": 1}<eos>\nT:ab<eos>\nA:')


def test_requests_are_sampled_as_training_assumes() -> None:
    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        await ask(client, [user(prompt)], temperature=0.1, top_p=0.5, max_completion_tokens=3)
        return 1.0

    engine = ScriptedEngine([[A, EOS]])
    one(play, engine, sampling=SamplingParams(temperature=0.7, max_tokens=9))
    assert (engine.sampling[0].temperature, engine.sampling[0].top_p, engine.sampling[0].max_tokens) == (0.7, 1.0, 3)


def test_what_does_not_continue_starts_a_new_row_and_counts() -> None:
    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        await ask(client, [user(prompt)])
        await ask(client, [user(prompt), assistant("changed"), user("more")])
        return 1.0

    trajectory = one(play, ScriptedEngine([[A, EOS], [B, EOS]]))
    assert trajectory.extra_logs["conversations"] == 2.0
    assert trajectory.response_length == 2 and trajectory.token_ids.tolist()[-2:] == [B, EOS]


def test_concurrent_requests_and_samples_do_not_mix() -> None:
    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        await asyncio.gather(*(ask(client, [user(word)]) for word in ("x", "y", "z")))
        return 1.0

    engine = ScriptedEngine(lambda ids, sampling: [*ids[2:3], EOS], delays=[0.03, 0.01, 0.02] * 2)
    group = episodes(play, engine, n=2)
    assert len(group.trajectories) == 2
    for trajectory in group.trajectories:
        assert trajectory.extra_logs["conversations"] == 3.0
        echoed = trajectory.token_ids[trajectory.action_mask].tolist()
        assert echoed == [trajectory.token_ids[2], EOS]


def test_a_row_is_continued_by_one_request_at_a_time() -> None:
    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        history = [user(prompt)]
        await ask(client, history)
        history += [assistant("ab"), user("more")]
        await asyncio.gather(ask(client, history), ask(client, history))
        return 1.0

    engine = ScriptedEngine([[A, B, EOS], [A, EOS], [B, EOS]], delays=[0, 0.05, 0.05])
    trajectory = one(play, engine)
    assert trajectory.extra_logs["conversations"] == 2.0
    for prompt in engine.prompts[1:]:
        assert TOK.decode(prompt) == "U:hi<eos>\nA:ab<eos>\nU:more<eos>\nA:"


def test_a_full_context_is_refused_and_counts_as_truncated() -> None:
    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        await ask(client, [user(prompt)])
        with pytest.raises(openai.BadRequestError, match="context_length_exceeded: .* tokens, the limit is 20"):
            await ask(client, [user(prompt), assistant("ab"), user("more")])
        return 0.5

    trajectory = one(play, ScriptedEngine([[A, B, EOS]]), max_length=20)
    assert trajectory.truncated and trajectory.token_ids.tolist()[-3:] == [A, B, EOS]


def test_after_a_refusal_a_shorter_request_goes_on_with_the_same_row() -> None:
    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        history = [user(prompt), assistant("ab")]
        await ask(client, history[:1])
        with pytest.raises(openai.BadRequestError, match="context_length_exceeded: .* tokens, the limit is 32"):
            await ask(client, [*history, user("more " * 20)])
        await ask(client, [*history, user("more")])
        return 0.5

    trajectory = one(play, ScriptedEngine([[A, B, EOS], [B, EOS]]), max_length=32)
    assert trajectory.extra_logs["conversations"] == 1.0 and not trajectory.truncated
    assert trajectory.token_ids[trajectory.action_mask].tolist() == [A, B, EOS, B, EOS]
    assert TOK.decode(trajectory.token_ids.tolist()) == "U:hi<eos>\nA:ab<eos>\nU:more<eos>\nA:b<eos>"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("chat/completions", {"messages": []}, "messages must be a list of messages"),
        ("chat/completions", {"messages": [user("x")], "n": 2}, "n=2 is not supported"),
        ("chat/completions", {"messages": [{"role": "bad", "content": "x"}]}, "template refuses .*: unknown role"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"content of type \['image_url'\] is not supported",
        ),
        ("completions", {"prompt": ["a", "b"]}, "prompt must be one text"),
        ("completions", [], "the body must be a JSON object"),
        ("completions", "{", "Expecting"),
    ],
)
def test_requests_that_can_not_be_served_say_why(path: str, body: Any, words: str) -> None:
    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        await ask(client, [user(prompt)])
        async with aiohttp.ClientSession() as session:
            payload = {"data": body} if isinstance(body, str) else {"json": body}
            async with session.post(f"{client.base_url}{path}", **payload) as response:
                assert response.status == 400
                message = (await response.json())["error"]["message"]
        assert re.search(words, message), message
        return 1.0

    assert one(play, ScriptedEngine([[A, EOS]])).reward == 1.0


def test_an_episode_that_is_over_answers_no_more() -> None:
    urls = []

    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        await ask(client, [user(prompt)])
        if urls:
            late = openai.AsyncOpenAI(base_url=urls[0], api_key="none", max_retries=0)
            with pytest.raises(openai.BadRequestError, match="this episode is over"):
                await ask(late, [user(prompt)])
            await late.close()
        urls.append(str(client.base_url))
        return 1.0

    async def run() -> None:
        executor = Executor(play)
        spec = EpisodeSpec(sampling=SamplingParams(), max_length=99, tokenizer=TOK, executor=executor)
        engine = ScriptedEngine(lambda ids, sampling: [A, EOS])
        for _ in range(2):
            await run_group(item(TOK, "hi"), 1, engine, spec)
        await executor.close()

    asyncio.run(run())
    assert len(set(urls)) == 2


def test_engine_trouble_ends_the_episode_even_if_the_agent_hides_it() -> None:
    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        with pytest.raises(openai.InternalServerError, match="generation engine failed"):
            await ask(client, [user(prompt)])
        return 0.0

    with pytest.raises(EngineError, match="prompt 4 sample 0: the generation engine failed: RuntimeError: gone"):
        one(play, ScriptedEngine([RuntimeError("gone")]), on_agent_failure="drop")


def test_an_agent_that_never_asks_is_named() -> None:
    async def play(client: openai.AsyncOpenAI, prompt: str, label: Any) -> float:
        return 1.0

    with pytest.raises(AgentError, match=r"prompt 4 sample 0: Executor.run\(\) ended without a single reply"):
        one(play, ScriptedEngine([]))
