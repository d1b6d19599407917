"""Tools in data: arguments of calls as chat templates take them (JSON text, object, or either), and descriptions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from data_cases import CHATML, letters
from datasets import Dataset

from openrlhf.config import DPOConfig, KTOConfig, PPOConfig, RMConfig, SFTConfig
from openrlhf.datasets import sft
from openrlhf.datasets.preference import build_preference_dataset
from openrlhf.datasets.prompts import build_prompts
from openrlhf.datasets.sft import open_sft_dataset
from openrlhf.datasets.text import render
from openrlhf.datasets.unpaired import build_unpaired_dataset
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


ANSWER = [{"role": "assistant", "content": "y"}]
ASKED = [{"role": "user", "content": "x"}]
ROW = {"input": ASKED, "output": ANSWER, "worse": [{"role": "assistant", "content": "n"}], "label": 1}
COLUMNS = {"input_key": "input", "output_key": "output"}
PAIR = {"prompt_key": "input", "chosen_key": "output", "rejected_key": "worse"}
SHOWS_TOOLS = "{% for tool in tools or () %}{{ tool | tojson }}{% endfor %}" + CHATML


@pytest.mark.parametrize(
    ("build", "config", "flags"),
    [
        (open_sft_dataset, SFTConfig, COLUMNS),
        (build_unpaired_dataset, KTOConfig, COLUMNS),
        (build_preference_dataset, RMConfig, PAIR),
        (build_preference_dataset, DPOConfig, PAIR),
    ],
)
@pytest.mark.parametrize(
    ("template", "tools", "told"),
    [
        (SHOWS_TOOLS, [{"name": "f"}], True),
        (SHOWS_TOOLS, '[{"name": "f"}]', True),
        (SHOWS_TOOLS, [], False),
        (SHOWS_TOOLS, "", False),
        (SHOWS_TOOLS, None, False),
        (CHATML, [{"name": "f"}], False),
    ],
)
def test_tools_that_no_flag_shows_are_told(
    build: Any,
    config: Any,
    flags: dict[str, str],
    template: str,
    tools: Any,
    told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cfg = config(dataset="rows", apply_chat_template=True, max_len=100, **flags)
    build(Dataset.from_list([{**ROW, "tools": None}, {**ROW, "tools": tools}]), cfg, letters(template), "rows")
    expected = (
        "rows: the chat template is not given the column 'tools'; tools that the model should know belong into a "
        "system message"
    )
    assert caplog.messages == [expected] * told


def test_lazily_read_rows_have_their_tools_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sft, "AHEAD_ROWS", 0)
    cfg = SFTConfig(dataset="rows", apply_chat_template=True, **COLUMNS)
    open_sft_dataset(Dataset.from_list([{**ROW, "tools": [{"name": "f"}]}]), cfg, letters(SHOWS_TOOLS), "rows")
    assert len([m for m in caplog.messages if "'tools'" in m]) == 1


@pytest.mark.parametrize(("flags", "told"), [({}, 1), ({"tool_key": "tools"}, 0)])
def test_prompts_tell_the_flag_that_shows_tools(
    flags: dict[str, str], told: int, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = PPOConfig(prompt_data="rows", apply_chat_template=True, **flags)
    rows = Dataset.from_list([{"input": ASKED, "tools": [{"name": "f"}]}])
    (prompt,) = build_prompts(rows, cfg, letters(SHOWS_TOOLS), 100, "rows")
    assert caplog.messages == ["rows: the chat template is not given the column 'tools'; give --tool_key tools"] * told
    assert ('{"name": "f"}' in prompt.text) == (not told)
    assert prompt.metadata["tools"] == [{"name": "f"}]
