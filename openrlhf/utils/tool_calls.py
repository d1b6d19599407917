"""Arguments of tool calls: a JSON text in OpenAI's protocol and in many data sets, an object in most chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from openrlhf.utils.template_facts import template_fact

_ID = "a1b2c3d4e"  # Mistral's templates want nine characters


class Readable(NamedTuple):
    """In which forms a chat template takes the arguments of a call."""

    as_text: bool
    as_object: bool


def with_readable_arguments(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages whose tool calls have their arguments in a form that the chat template takes.

    A template that writes objects as JSON makes a quoted text of a JSON text; one that puts texts together refuses
    objects. Arguments in a form that it takes stay as they are, and so does what is no JSON object.
    """
    if not any(message.get("tool_calls") for message in messages):
        return list(messages)
    takes = _readable(tokenizer)
    return [_message(message, takes) if message.get("tool_calls") else message for message in messages]


def _message(message: Mapping[str, Any], takes: Readable) -> Mapping[str, Any]:
    calls = message["tool_calls"]
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return message
    return {**message, "tool_calls": [_call(call, takes) if isinstance(call, Mapping) else call for call in calls]}


def _call(call: Mapping[str, Any], takes: Readable) -> Mapping[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _function(function, takes)}
    return _function(call, takes)  # some data has name and arguments in the call itself


def _function(function: Mapping[str, Any], takes: Readable) -> Mapping[str, Any]:
    if "arguments" not in function:
        return function
    return {**function, "arguments": _arguments(function["arguments"], takes)}


def _arguments(value: Any, takes: Readable) -> Any:
    if isinstance(value, str) and takes.as_object and not takes.as_text:
        try:
            decoded = json.loads(value) if value.strip() else {}
        except ValueError:
            return value
        return decoded if isinstance(decoded, dict) else value
    if isinstance(value, Mapping) and takes.as_text and not takes.as_object:
        return json.dumps(value, ensure_ascii=False)
    return value


def _readable(tokenizer: Any) -> Readable:
    """By a call of which the template writes the arguments as they are, quoted, or not at all."""

    def trial() -> Readable:
        own = {"Qx7": "Zk4"}
        text, python = json.dumps(own), str(own)
        as_text = any(text in written for written in _written(tokenizer, text))
        as_object = any("Zk4" in written and python not in written for written in _written(tokenizer, own))
        return Readable(as_text, as_object)

    return template_fact(tokenizer, "readable_arguments", trial)


def _written(tokenizer: Any, arguments: Any) -> list[str]:
    """A conversation with a call, as far as the template takes it: some want a content beside it, some none."""
    texts = []
    for content in (None, ""):
        call = {"id": _ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": _ID, "name": "f", "content": "1"},
        ]
        try:
            written = tokenizer.apply_chat_template(messages, tools=None, tokenize=False, add_generation_prompt=True)
        except Exception:  # templates are programs of the model's makers, and raise what they like
            continue
        texts.append(str(written))
    return texts
