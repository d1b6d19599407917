"""Agents that talk to the policy over HTTP, in the protocol of OpenAI's API.

Any harness with an OpenAI client can play the episodes. Ids stay as they were sampled: a request whose text begins
with the text so far continues the ids so far, and only what is new is encoded.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import uuid
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from openrlhf.rollout.agents import AgentExecutorBase, Episode
from openrlhf.rollout.errors import AgentError, EngineError
from openrlhf.rollout.openai_wire import Refused, ToolReply, chat_message, plain_messages, reply_body, stream_lines
from openrlhf.rollout.text import continuation_text
from openrlhf.utils.continued import continued_ids
from openrlhf.utils.first_ids import first_ids
from openrlhf.utils.tool_calls import with_readable_arguments

logger = logging.getLogger(__name__)


@dataclass
class _Conversation(Episode):
    """One of the rows of ids of a session.

    Attributes:
        shown: its text as the client has it: without what ended the last reply, a stop string or an end token.
        reply: the last reply as the client has it.
        busy: a reply is being sampled.
    """

    shown: str = ""
    reply: str = ""
    busy: bool = False

    def beginning(self, text: str, replies: Collection[str] | None) -> str | None:
        """How much of a request's text is this conversation so far; None where the text does not continue it.

        Args:
            text: the whole text.
            replies: contents of the messages of the assistant in it; None without messages.
        """
        if text.startswith(self.text):
            return self.text
        # A message that merely begins like the reply was changed, and after an empty one the client asks once more.
        if self.reply and text.startswith(self.shown) and (replies is None or self.reply in replies):
            return self.shown
        return None


@dataclass
class _Session:
    """What the server knows of one episode."""

    sampling_params: Any
    max_length: int
    tokenizer: Any
    engine: Any
    conversations: list[_Conversation] = field(default_factory=list)
    tool_replies: dict[str, ToolReply] = field(default_factory=dict)
    last: _Conversation | None = None

    async def complete(
        self, text: str, limit: int | None, stop: list[str], replies: Collection[str] | None
    ) -> tuple[Any, int]:
        """Samples a continuation of `text`; returns the completion and the number of prompt tokens.

        Args:
            replies: what the assistant said in the messages that a chat template made the text of; None without.
        """
        conversation, new = self._continued(text, replies)
        start = len(conversation.ids) + len(new)
        room = self.max_length - start
        if room <= 0:
            # Nothing is appended: the client may come back with less.
            conversation.truncated = True
            self.last = conversation if conversation.ranges else self.last
            raise Refused(f"context_length_exceeded: {start} tokens, the limit is {self.max_length}")
        params = copy.deepcopy(self.sampling_params)
        limits = [room, *(number for number in (params.max_tokens, limit) if number is not None)]
        params.max_tokens = min(limits)
        params.stop = [*params.stop, *stop]
        conversation.busy = True
        try:
            prompt = [*conversation.ids, *new]
            output = (await self.engine.generate(prompt, params)).outputs[0]
        finally:
            conversation.busy = False
        if not conversation.ranges:
            self.conversations.append(conversation)
        conversation.append(new)
        conversation.take_turn(output)
        conversation.text = text + continuation_text(self.tokenizer, prompt, output.token_ids)
        conversation.shown, conversation.reply = text + output.text, output.text
        self.last = conversation
        return output, start

    def _continued(self, text: str, replies: Collection[str] | None) -> tuple[_Conversation, list[int]]:
        """The conversation that `text` continues, a new one if there is none, and the ids that come new."""
        begun = ((c, c.beginning(text, replies)) for c in self.conversations if c.ranges and not c.busy)
        fitting = [(c, len(known)) for c, known in begun if known is not None]
        if not fitting:
            return _Conversation([], "", []), self._begun(text, chat=replies is not None)
        conversation, known = max(fitting, key=lambda fit: fit[1])
        return conversation, continued_ids(self.tokenizer, text[known:])

    def _begun(self, text: str, chat: bool) -> list[int]:
        """Ids of a new conversation: the prompt's own text has the prompt's own ids."""
        prompt = list(getattr(self.engine, "prompt_token_ids", ()))
        if prompt and text == self.engine.prompt_text:
            return prompt
        if chat:  # the template has put every special token in
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        return first_ids(self.tokenizer, text, like=prompt)


class OpenAIAgentExecutor(AgentExecutorBase):
    """Serves /v1/chat/completions and /v1/completions on loopback to `run`, which plays the episode.

    Requests are sampled with the options of the training run; of a request's own options only `stop`, `max_tokens`
    and `max_completion_tokens` count, because training assumes the others. A request that continues no earlier text
    (another conversation, or a chat template that changes earlier turns) starts a new row. The row of the last
    reply is the one that is trained on; the extra log `conversations` counts the rows. Streamed replies come in one
    piece, when all of it has been sampled.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._port = 0

    @abstractmethod
    async def run(self, base_url: str, prompt: str, label: Any) -> dict[str, Any] | float:
        """Plays one episode.

        Args:
            base_url: what an OpenAI client takes as base_url; this episode's own. Any API key and model name do.
            prompt: prompt text.
            label: raw value of the label column.

        Returns:
            The reward, or a dict with "reward" and optionally "scores" and "extra_logs".
        """

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Plays one episode; see AgentExecutorBase.execute."""
        await self._start()
        key = uuid.uuid4().hex
        session = self._sessions[key] = _Session(sampling_params, max_length, hf_tokenizer, llm_engine)
        try:
            verdict = await self.run(f"http://127.0.0.1:{self._port}/{key}/v1", prompt, label)
        finally:
            del self._sessions[key]
        row = session.last
        if row is None:
            raise AgentError(
                f"{getattr(llm_engine, 'name', 'sample')}: {type(self).__name__}.run() ended without a single reply of "
                "the policy; send requests to base_url"
            )
        result: dict[str, Any] = dict(verdict) if isinstance(verdict, Mapping) else {"reward": verdict}
        logs = {**(result.get("extra_logs") or {}), "conversations": len(session.conversations)}
        verdicts = {"reward": result.get("reward"), "scores": result.get("scores"), "extra_logs": logs}
        return {**row.output(prompt, label), **verdicts}

    async def close(self) -> None:
        """Stops the server."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _start(self) -> None:
        async with self._starting:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=64 * 2**20)
            app.router.add_post("/{episode}/v1/chat/completions", partial(self._answer, chat=True))
            app.router.add_post("/{episode}/v1/completions", partial(self._answer, chat=False))
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._port = runner.addresses[0][1]
            self._runner = runner

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        session = self._sessions.get(request.match_info["episode"])
        try:
            if session is None:
                raise Refused("this episode is over")
            body = await request.json()
            if not isinstance(body, dict):
                raise Refused("the body must be a JSON object")
            if body.get("n") not in (None, 1):
                raise Refused(f"n={body['n']!r} is not supported")
            limit = body.get("max_completion_tokens") or body.get("max_tokens")
            stop = body.get("stop") or []
            text, replies = _chat_text(body, session) if chat else (_plain_text(body), None)
            stops = [stop] if isinstance(stop, str) else stop
            output, used = await session.complete(text, limit, stops, replies)
        except (Refused, AgentError, json.JSONDecodeError) as error:
            return _error(400, "invalid_request_error", error)
        except EngineError as error:  # the engine's record of it ends the episode, whatever the client does
            return _error(500, "engine_error", error)
        message = None
        if chat:
            message = chat_message(output.text, bool(body.get("tools")) and body.get("tool_choice") != "none")
            if "tool_calls" in message:
                session.tool_replies[message["tool_calls"][0]["id"]] = ToolReply(output.text, message)
        reply = reply_body(body, output, used, message)
        if not body.get("stream"):
            return web.json_response(reply)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for line in stream_lines(reply, body.get("stream_options")):
            await response.write(line.encode())
        return response


def _chat_text(body: Mapping[str, Any], session: _Session) -> tuple[str, set[str]]:
    """The text of a request's messages, and what the assistant said in them."""
    messages = plain_messages(body.get("messages"), session.tool_replies)
    options = {"tools": body.get("tools"), "tokenize": False, "add_generation_prompt": True}
    try:
        text = session.tokenizer.apply_chat_template(with_readable_arguments(session.tokenizer, messages), **options)
    except Exception as error:  # templates are programs of the model's makers; the client gets their words
        raise Refused(f"the chat template refuses these messages: {error}") from error
    return text, {m["content"] for m in messages if m.get("role") == "assistant" and isinstance(m.get("content"), str)}


def _plain_text(body: Mapping[str, Any]) -> str:
    if not isinstance(body.get("prompt"), str):
        raise Refused("prompt must be one text")
    return body["prompt"]


def _error(status: int, kind: str, error: Exception) -> web.Response:
    message = str(error) or type(error).__name__
    return web.json_response({"error": {"message": message, "type": kind, "code": status}}, status=status)
