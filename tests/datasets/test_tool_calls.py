"""Arguments of tool calls as chat templates take them: JSON text, object, or either."""

from __future__ import annotations

import json
from typing import Any

import pytest
from data_cases import letters

from openrlhf.datasets.text import render
from openrlhf.utils.tool_calls import with_readable_arguments

ARGUMENTS = {"city": "Zürich", "days": [1, 2]}
AS_JSON = '{"city": "Zürich", "days": [1, 2]}'

HEAD = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}"
)
TAIL = "{% endfor %}{% endif %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
WRITES_JSON = HEAD + "{{ c.function.name }}{{ c.function.arguments | tojson }}" + TAIL
EITHER = (
    HEAD + "{{ c.function.name }}{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}" + TAIL
)
# Text only, and only beside no content at all.
JOINS_TEXTS = HEAD.replace("{% if m.tool_calls %}", "{% if m.content is none %}") + (
    "{{ c.function.name + c.function.arguments }}" + TAIL
)
PYTHON = HEAD + "{{ c.function.name }}{{ c.function.arguments }}" + TAIL  # writes an object as Python does
ITEMS = HEAD + "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<{{ k }}={{ v }}>{% endfor %}" + TAIL
NO_ARGUMENTS = HEAD + "{{ c.function.name }}" + TAIL


def talk(arguments: Any, nested: bool = True) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": arguments}
    call = {"type": "function", "function": function} if nested else function
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (WRITES_JSON, AS_JSON),
        (EITHER, AS_JSON),
        (JOINS_TEXTS, AS_JSON),
        (PYTHON, AS_JSON),
        (ITEMS, "<city=Zürich><days=[1, 2]>"),
        (NO_ARGUMENTS, ""),
    ],
    ids=["json", "either", "text", "python", "items", "none"],
)
@pytest.mark.parametrize("given", [ARGUMENTS, AS_JSON], ids=["object", "text"])
def test_every_form_is_written_as_the_template_means_it(template: str, written: str, given: Any) -> None:
    tokenizer = letters(template)
    messages = talk(given)
    assert render(tokenizer, messages, False, "row 0") == f"[user]q[assistant]weather{written}"
    assert messages == talk(given)  # the data is not changed


def test_what_the_template_takes_stays_as_it_is() -> None:
    spaced = '{"city":   "Bonn"}'
    assert with_readable_arguments(letters(EITHER), talk(spaced)) == talk(spaced)
    calls = [
        *({"function": {"name": "f", "arguments": own}} for own in ("not JSON", "[1]", "", " ", 7)),
        {"name": "f", "arguments": spaced},
        {"function": {"name": "f"}},
        "call",
    ]
    (read,) = with_readable_arguments(letters(WRITES_JSON), [{"role": "assistant", "tool_calls": calls}])
    found = [c if isinstance(c, str) else c.get("function", c).get("arguments") for c in read["tool_calls"]]
    assert found == ["not JSON", "[1]", {}, {}, 7, {"city": "Bonn"}, None, "call"]


def test_another_template_is_asked_anew() -> None:
    tokenizer = letters(WRITES_JSON)
    (_, answer) = with_readable_arguments(tokenizer, talk(AS_JSON))
    assert answer["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    tokenizer.chat_template = JOINS_TEXTS
    (_, answer) = with_readable_arguments(tokenizer, talk(ARGUMENTS))
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
