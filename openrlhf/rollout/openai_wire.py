"""OpenAI's API on the wire: messages as they come in, replies whole or as a stream, tool calls in both directions."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class Refused(Exception):
    """A request that can't be served; the message goes to the client."""


@dataclass(frozen=True)
class ToolReply:
    """A reply with tool calls: the text that was sampled, and the message that the client got for it."""

    text: str
    message: Mapping[str, Any]


def plain_messages(messages: Any, known: Mapping[str, ToolReply]) -> list[dict[str, Any]]:
    """Messages for a chat template, their content as text (clients may send it as a list of text parts).

    A reply with tool calls that comes back as it was sent becomes its sampled text again: a template would write the
    calls in its own layout, and the turn would not continue what was sampled.

    Args:
        messages: the request's.
        known: earlier replies by the id of their first tool call.

    Raises:
        Refused: they are no messages, or have content other than text.
    """
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise Refused("messages must be a list of messages")
    plain = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            kinds = {part.get("type") for part in content if isinstance(part, dict)}
            if kinds != {"text"}:
                raise Refused(f"message content of type {sorted(map(str, kinds))} is not supported, only text")
            message = {**message, "content": "".join(part["text"] for part in content)}
        calls = message.get("tool_calls")
        reply = known.get(_first_id(calls)) if calls else None
        if reply is not None and _same_reply(message, reply.message):
            message = {"role": "assistant", "content": reply.text}
        plain.append(message)
    return plain


def _first_id(calls: Any) -> str:
    first = calls[0] if isinstance(calls, list) else None
    return str(first.get("id")) if isinstance(first, dict) else ""


def _same_reply(message: Mapping[str, Any], sent: Mapping[str, Any]) -> bool:
    """Clients encode the arguments anew, and send no content as None, as "" or not at all."""

    def content(one: Mapping[str, Any]) -> tuple[str, list[tuple[Any, Any]]]:
        calls = [call["function"] for call in one["tool_calls"]]
        return one.get("content") or "", [(call["name"], json.loads(call["arguments"])) for call in calls]

    try:
        return content(message) == content(sent)
    except (KeyError, TypeError, ValueError):
        return False


def chat_message(text: str, with_tools: bool) -> dict[str, Any]:
    """The assistant's message for a sampled text.

    Where the request has tools, calls in the form ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (that of
    Qwen's and Hermes' models) become `tool_calls`, and the content is the text before them. If one of them is broken,
    all of it stays text.
    """
    bodies = _TOOL_CALL.findall(text) if with_tools else []
    calls = []
    for body in bodies:
        try:
            call = json.loads(body)
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments") or {})}
        except (ValueError, TypeError, KeyError, AttributeError):
            return {"role": "assistant", "content": text}
        calls.append({"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function})
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text.partition("<tool_call>")[0].strip() or None, "tool_calls": calls}


def reply_body(body: Mapping[str, Any], output: Any, prompt_tokens: int, message: Any = None) -> dict[str, Any]:
    """A whole reply: to a chat where `message` is given, else to a plain completion."""
    choice = {"index": 0, "finish_reason": output.finish_reason, "logprobs": None}
    if message is None:
        choice["text"] = output.text
    else:
        choice["message"] = message
        if "tool_calls" in message:
            choice["finish_reason"] = "tool_calls"
    sampled = len(output.token_ids)
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion" if message is None else "chat.completion",
        "created": int(time.time()),
        "model": body.get("model", "policy"),
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": prompt_tokens + sampled,
        },
    }


def stream_lines(reply: Mapping[str, Any], options: Any) -> Iterator[str]:
    """A reply as server-sent events: the text in one piece, then the reason for its end.

    Args:
        reply: from `reply_body`.
        options: the request's `stream_options`.
    """
    (choice,) = reply["choices"]
    common = {name: reply[name] for name in ("id", "object", "created", "model")}
    if "message" in choice:
        common["object"] = "chat.completion.chunk"
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
        pieces: Sequence[dict[str, Any]] = [
            {"index": 0, "delta": delta, "finish_reason": None},
            {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]},
        ]
    else:
        pieces = [choice]
    chunks = [{**common, "choices": [piece]} for piece in pieces]
    if isinstance(options, Mapping) and options.get("include_usage"):
        chunks.append({**common, "choices": [], "usage": reply["usage"]})
    for chunk in chunks:
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"
