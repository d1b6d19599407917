"""What is trained on in conversations as widely used models write them, letter by letter."""

from __future__ import annotations

from typing import Any

import chat_templates as families
import pytest
from chat_templates import Family
from data_cases import letters
from datasets import Dataset

from openrlhf.config import DPOConfig, PPOConfig, RMConfig, SFTConfig
from openrlhf.datasets.preference import PreferenceFormat, tokenize_pair
from openrlhf.datasets.prompts import build_prompts
from openrlhf.datasets.sft import SFTFormat, tokenize_sft_row
from openrlhf.datasets.sources import DataError

TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "r"},
    {"role": "assistant", "content": "b"},
]
NO_SYSTEM = TALK[1:]

# family, conversation, its head before the last answer, the last answer as it is learnt, every answer as it is learnt
GOLDEN: dict[str, tuple[Family, list[dict[str, str]], str, str, str | None]] = {
    "llama3": (
        families.LLAMA3,
        TALK,
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\na<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nr<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "b<|eot_id|>",
        "a<|eot_id|>b<|eot_id|>",
    ),
    "chatml": (
        families.CHATML,
        TALK,
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n",
        "b<|im_end|>",
        "a<|im_end|>b<|im_end|>",
    ),
    "qwen2.5": (
        families.QWEN25,
        NO_SYSTEM,
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
        "a<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n",
        "b<|im_end|>",
        "a<|im_end|>b<|im_end|>",
    ),
    "qwen3": (
        families.QWEN3,
        [*TALK[:2], {"role": "assistant", "content": "<think>\nhm\n</think>\n\na"}, *TALK[3:]],
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n",
        "<think>\n\n</think>\n\nb<|im_end|>",
        None,  # the first answer lost its thought when the second question came
    ),
    "mistral": (
        families.MISTRAL,
        TALK,
        "<s>[INST] S\n\nq[/INST] a</s>[INST] r[/INST]",
        " b</s>",
        " a</s> b</s>",
    ),
    "gemma": (
        families.GEMMA,
        NO_SYSTEM,
        "<bos><start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\na<end_of_turn>\n"
        "<start_of_turn>user\nr<end_of_turn>\n<start_of_turn>model\n",
        "b<end_of_turn><eos>",
        "a<end_of_turn>b<end_of_turn><eos>",
    ),
    "glm": (
        families.GLM,
        TALK,
        "[gMASK]<sop><|system|>\nS<|user|>\nq<|assistant|>\na<|user|>\nr<|assistant|>\n",
        "b<eos>",
        "a<|user|>b<eos>",
    ),
}


def tokenizer_of(family: Family) -> Any:
    return letters(family.template, family.eos, adds_bos=True, special=family.special, bos=family.bos)


def style(**changes: Any) -> SFTFormat:
    flags = {"input_key": "talk", "output_key": None, "apply_chat_template": True, "max_len": 999}
    return SFTFormat.from_config(SFTConfig(**{**flags, **changes}))


@pytest.mark.parametrize("name", GOLDEN)
def test_sft(name: str) -> None:
    family, talk, head, last, every = GOLDEN[name]
    tokenizer = tokenizer_of(family)

    def texts(**changes: Any) -> tuple[str, str]:
        row = tokenize_sft_row({"talk": talk}, "row 0", style(**changes), tokenizer)
        learnt = [token for token, on in zip(row.token_ids, row.loss_mask, strict=True) if on]
        assert row.token_ids == tokenizer(tokenizer.decode(row.token_ids), add_special_tokens=False)["input_ids"]
        return tokenizer.decode(row.token_ids), tokenizer.decode(learnt)

    assert texts() == (head + last, last)
    if every is None:
        with pytest.raises(DataError, match="rewrites earlier turns.*message 2"):
            texts(multiturn=True)
    else:
        assert texts(multiturn=True) == (head + last, every)


@pytest.mark.parametrize("name", GOLDEN)
def test_prompts_of_rollouts_are_the_heads_that_sft_learns_after(name: str) -> None:
    family, talk, head, *_ = GOLDEN[name]
    tokenizer = tokenizer_of(family)
    cfg = PPOConfig(input_key="talk", apply_chat_template=True)
    (prompt,) = build_prompts(Dataset.from_list([{"talk": talk[:-1]}]), cfg, tokenizer, 999)
    assert prompt.text == tokenizer.decode(prompt.token_ids) == head
    assert prompt.token_ids.count(tokenizer.bos_token_id) == head.count(family.bos)


@pytest.mark.parametrize("name", GOLDEN)
def test_pairs_have_the_answers_behind_the_same_head(name: str) -> None:
    family, talk, head, last, _ = GOLDEN[name]
    tokenizer = tokenizer_of(family)
    cfg = DPOConfig(prompt_key="talk", chosen_key="good", rejected_key="bad", apply_chat_template=True, max_len=999)
    row = {"talk": talk[:-1], "good": talk[-1:], "bad": [{"role": "assistant", "content": "c"}]}
    pair = tokenize_pair(row, "row 0", PreferenceFormat.from_config(cfg), tokenizer)
    for ids, mask, answer in (
        (pair.chosen_ids, pair.chosen_mask, last),
        (pair.rejected_ids, pair.rejected_mask, last.replace("b", "c", 1)),
    ):
        assert tokenizer.decode(ids) == head + answer
        assert tokenizer.decode(ids[mask.index(True) :]) == answer and sum(mask) == len(ids) - mask.index(True)


def test_a_refusal_of_the_template_names_the_row() -> None:
    with pytest.raises(DataError, match="row 4: the chat template refuses the messages: System role not supported"):
        tokenize_sft_row({"talk": TALK}, "row 4", style(), tokenizer_of(families.GEMMA))


def parts(*said: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in said]


TAKES_PARTS = (
    "{% for m in messages %}{{ '[' + m.role + ']' }}{% for part in m.content %}{{ '<' + part.text + '>' }}{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@pytest.mark.parametrize("name", ["llama3", "chatml", "gemma"])
def test_parts_of_texts_are_read_as_their_text(name: str) -> None:
    family, talk, *_ = GOLDEN[name]
    tokenizer = tokenizer_of(family)
    split = [{"role": m["role"], "content": parts(m["content"], "!")} for m in talk]
    joined = [{"role": m["role"], "content": m["content"] + "!"} for m in talk]
    for how in (style(), style(multiturn=True)):
        assert tokenize_sft_row({"talk": split}, "row 0", how, tokenizer) == tokenize_sft_row(
            {"talk": joined}, "row 0", how, tokenizer
        )
    picture = [{"role": "user", "content": [{"type": "image"}, *parts("q")]}, talk[-1]]
    with pytest.raises(DataError, match="row 3: the chat template takes texts only.*'image'"):
        tokenize_sft_row({"talk": picture}, "row 3", style(), tokenizer)
    tokenizer.chat_template = TAKES_PARTS  # keeps them
    row = tokenize_sft_row(
        {"talk": [{**m, "content": parts("a", "b")} for m in talk[-2:]]}, "row 0", style(), tokenizer
    )
    assert tokenizer.decode(row.token_ids) == f"[user]<a><b>{family.eos}[assistant]<a><b>{family.eos}"


@pytest.mark.parametrize(
    ("answer", "changes", "words"),
    [
        (
            {"content": None, "tool_calls": [{"function": {"name": "find"}}]},
            {},
            r"'.*None<\|eot_id\|>', without.*call 'find'",
        ),
        ({"content": "a", "tool_calls": [{"name": "find"}]}, {}, "'a<.*without its tool call 'find'"),
        ({"content": "hm</think>a"}, {"template": "split('</think>')[-1]"}, "'a<.*without .all of. its content"),
    ],
)
def test_answers_that_the_template_leaves_out(answer: dict[str, Any], changes: dict[str, str], words: str) -> None:
    family = families.LLAMA3
    template = family.template.replace("m.content | trim", "m.content." + changes["template"]) if changes else None
    tokenizer = tokenizer_of(family._replace(template=template or family.template))
    talk = [TALK[1], {"role": "assistant", **answer}]
    with pytest.raises(DataError, match=f"row 5: the chat template writes message 1 as {words}"):
        tokenize_sft_row({"talk": talk}, "row 5", style(), tokenizer)
    if answer["content"] is None:
        cfg = RMConfig(chosen_key="talk", rejected_key="talk", apply_chat_template=True)
        with pytest.raises(DataError, match="row 5.*without its tool call 'find'"):
            tokenize_pair({"talk": talk}, "row 5", PreferenceFormat.from_config(cfg), tokenizer)


def test_a_generation_prompt_that_opens_a_thought_which_answers_lose() -> None:
    template = (
        "{% for m in messages %}{{ '[' + m.role + ']' + m.content.split('</think>')[-1] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]<think>\\n' }}{% endif %}"
    )
    tokenizer = letters(template)
    talk = [TALK[1], {"role": "assistant", "content": "<think>\nhm\n</think>a"}]
    for how in (style(), style(multiturn=True)):
        with pytest.raises(DataError, match="message 1 as its generation prompt does.*<think>") as told:
            tokenize_sft_row({"talk": talk}, "row 0", how, tokenizer)
        assert "multiturn" not in str(told.value) and "--tokenizer_chat_template" in str(told.value)


def test_a_thought_is_learnt_in_the_last_answer() -> None:
    tokenizer = tokenizer_of(families.QWEN3)
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\na"}]
    row = tokenize_sft_row({"talk": talk}, "row 0", style(multiturn=True), tokenizer)
    text = tokenizer.decode(row.token_ids)
    assert text == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\na<|im_end|>"
    assert row.loss_mask.index(True) == row.token_ids.index(tokenizer.convert_tokens_to_ids("<"))


READS_THOUGHTS = (
    "{% for m in messages %}{{ '[' + m.role + ']' }}"
    "{% if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content.strip() + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content + eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def test_thoughts_beside_the_answer_are_learnt_with_it() -> None:
    tokenizer = letters(READS_THOUGHTS)
    talk = [TALK[1], {"role": "assistant", "content": "a", "reasoning_content": " hm\n\nso  "}]
    row = tokenize_sft_row({"talk": talk}, "row 0", style(), tokenizer)
    learnt = [token for token, on in zip(row.token_ids, row.loss_mask, strict=True) if on]
    assert tokenizer.decode(learnt) == f"<think>\nhm\n\nso\n</think>\n\na{tokenizer.eos_token}"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_that_the_template_does_not_read(key: str) -> None:
    tokenizer = tokenizer_of(families.CHATML)
    answer = {"role": "assistant", "content": "a", key: "hm"}
    words = (
        f"row 5: the chat template writes message 1 as .*'a<.*without the thoughts that it has under {key!r}; rename"
    )
    with pytest.raises(DataError, match=words):
        tokenize_sft_row({"talk": [TALK[1], answer]}, "row 5", style(), tokenizer)
    pair = {"talk": TALK[1:2], "good": [answer], "bad": [{"role": "assistant", "content": "c"}]}
    cfg = DPOConfig(prompt_key="talk", chosen_key="good", rejected_key="bad", apply_chat_template=True, max_len=999)
    with pytest.raises(DataError, match=words):
        tokenize_pair(pair, "row 5", PreferenceFormat.from_config(cfg), tokenizer)
    # Those of earlier turns, which nobody learns, are the template's own affair; and an answer may repeat its thoughts.
    earlier = [TALK[1], answer, {"role": "user", "content": "r"}, {"role": "assistant", "content": "b", key: " "}]
    assert sum(tokenize_sft_row({"talk": earlier}, "row 0", style(), tokenizer).loss_mask) == 2
    both = [TALK[1], {**answer, "content": "<think>hm</think>a"}]
    assert any(tokenize_sft_row({"talk": both}, "row 0", style(), tokenizer).loss_mask)
