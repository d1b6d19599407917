"""Where prompt and answer meet: no token across the border, and nothing that the text doesn't have."""

from __future__ import annotations

import random
from typing import Any

import pytest
from data_cases import CHATML
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from openrlhf.config import DPOConfig, SFTConfig
from openrlhf.datasets import text as texts
from openrlhf.datasets.preference import PreferenceFormat, tokenize_pair
from openrlhf.datasets.sft import SFTFormat, Tokenized, tokenize_sft_row
from openrlhf.utils.continued import continued_ids

TAGS = ["<pad>", "<unk>", "<eos>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "User: what is the capital?\nAssistant: Paris is the capital 0.12 u",
    "### Assistant: hello world\n\n\n ### Assistant\n\nyes yes no  日本語 é🙂",
]


def trained(kind: str) -> PreTrainedTokenizerFast:
    """Byte-level ("bytes"; "trimmed" tells places without blanks), or with words marked as SentencePiece does."""
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    alphabet: list[str] = []
    if kind in ("bytes", "trimmed"):
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.post_processor = processors.ByteLevel(trim_offsets=kind == "trimmed")
        inner.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
        inner.decoder = decoders.Metaspace(prepend_scheme=kind)
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=TAGS, initial_alphabet=alphabet, show_progress=False, min_frequency=20
    )
    inner.train_from_iterator(TEXTS * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def sft(row: dict[str, Any], tokenizer: Any, **changes: Any) -> Tokenized:
    return tokenize_sft_row(row, "row 0", SFTFormat.from_config(SFTConfig(**{"max_len": 9999, **changes})), tokenizer)


def learnt(row: Tokenized, tokenizer: Any) -> list[str]:
    """The text of each run of tokens that the loss is on."""
    runs: list[list[int]] = [[]]
    for token, on in zip(row.token_ids, row.loss_mask, strict=True):
        if on:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("kind", ["bytes", "trimmed", "first", "always"])
@pytest.mark.parametrize("answer", ["Paris is the capital", " Paris", "\n\nhello", "12"])
def test_answer_follows_the_default_template_without_a_blank_more(kind: str, answer: str) -> None:
    tokenizer = trained(kind)
    row = sft({"input": "what is", "output": answer}, tokenizer, output_key="output")
    prompt = "User: what is\nAssistant: "
    assert tokenizer.decode(row.token_ids) == prompt + answer + "<|im_end|>"
    head = tokenizer.encode(prompt, add_special_tokens=False)
    assert row.token_ids[: len(head)] == head and row.loss_mask.index(True) == len(head)


@pytest.mark.parametrize("kind", ["bytes", "first", "always"])
@pytest.mark.parametrize("text", ["", "a", "0.a", "\n", "\n\n yes", "  é", "<|im_end|>\n<|im_start|>user\nhello"])
def test_continued_ids_are_those_of_the_text_alone(kind: str, text: str) -> None:
    tokenizer = trained(kind)
    head = tokenizer.encode("the capital", add_special_tokens=False)
    ids = continued_ids(tokenizer, text)
    if kind == "always":  # it marks each text between special tokens, in whole texts as well
        text = text.replace("|>\n", "|> \n").replace("|>u", "|> u")
    assert tokenizer.decode(head + ids) == "the capital" + text
    if kind == "bytes":
        assert ids == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("kind", ["bytes", "trimmed"])
def test_answers_of_random_conversations(kind: str) -> None:
    tokenizer = trained(kind)
    rng = random.Random(0)
    words = ["hello", "world", "日本語", "é", "🙂", " ", "\n", "yes ", "no"]
    whole = 0
    for _ in range(60):
        talk = [
            {"role": role, "content": "".join(rng.choices(words, k=rng.randint(1, 5)))}
            for _ in range(rng.randint(1, 4))
            for role in ("user", "assistant")
        ]
        row = sft({"input": talk}, tokenizer, apply_chat_template=True, multiturn=True)
        answers = [message["content"] for message in talk if message["role"] == "assistant"]
        assert learnt(row, tokenizer) == [answer + "<|im_end|>" for answer in answers]
        text = tokenizer.apply_chat_template(talk, tokenize=False).rstrip("\n")
        assert tokenizer.decode(row.token_ids) == text
        head = texts.encode_rendered(tokenizer, texts.prompt_text(tokenizer, talk[:1], ""))
        assert row.token_ids[: len(head)] == head
        if not any(answer[0].isspace() for answer in answers):
            whole += 1
            assert row.token_ids == texts.encode_rendered(tokenizer, text)
    assert 10 < whole < 50


@pytest.mark.parametrize("fast", [True, False])
def test_pairs_behind_a_prompt_that_ends_in_a_blank(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = trained("first" if fast else "bytes")
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.is_fast", property(lambda self: fast))
    tokenizer.chat_template = (
        "{% for m in messages %}### {{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}### assistant: {% endif %}"
    )
    talks = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": word}] for word in ("yes", "no")]
    style = PreferenceFormat.from_config(DPOConfig(apply_chat_template=True, max_len=99))
    pair = tokenize_pair(dict(zip(("chosen", "rejected"), talks, strict=True)), "row 0", style, tokenizer)
    assert pair.dropped == ""
    halves = [(pair.chosen_ids, pair.chosen_mask), (pair.rejected_ids, pair.rejected_mask)]
    found = [learnt(Tokenized(ids, mask), tokenizer) for ids, mask in halves]
    assert found == [["yes<|im_end|>"], ["no<|im_end|>"]]
    assert pair.chosen_ids[: pair.chosen_mask.index(True)] == pair.rejected_ids[: pair.rejected_mask.index(True)]


def test_a_cut_at_one_border_makes_no_token_across_the_next() -> None:
    """Of xa and ab the first is merged first: cut between x and a, the rest of the text would be one token."""
    vocabulary = {symbol: i for i, symbol in enumerate(["x", "a", "b", "xa", "ab"])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, [("x", "a"), ("a", "b")])))
    for text, spans in (("xab", [(1, 2)]), ("xxab", [(2, 3)]), ("abxab", [(3, 4)])):
        ids, mask = texts.encode_spans(tokenizer, text, spans)
        assert "".join(tokenizer.convert_ids_to_tokens(ids)) == text
        assert [token for token, on in zip(tokenizer.convert_ids_to_tokens(ids), mask, strict=True) if on] == ["a"]


def test_a_tag_that_takes_the_line_break_behind_it_keeps_doing_so() -> None:
    """A break that is part of an end tag everywhere must not become a token where another border is cut."""
    tokenizer = trained("bytes")
    tags = [AddedToken(tag, rstrip=True, special=True) for tag in ("<|user|>", "<|end|>", "<|assistant|>")]
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    talk = [{"role": role, "content": "yes"} for _ in range(2) for role in ("user", "assistant")]
    row = sft({"input": talk}, tokenizer, apply_chat_template=True, multiturn=True)
    assert learnt(row, tokenizer) == ["yes<|end|>", "yes<|end|><|im_end|>"]
    text = tokenizer.apply_chat_template(talk, tokenize=False).rstrip("\n")
    assert row.token_ids[:-1] == texts.encode_rendered(tokenizer, text)
    assert "\n" not in tokenizer.decode(row.token_ids)
