"""Ends of responses and the text of rewards, with tokenizers as models have them."""

from __future__ import annotations

import pytest
from rollout_helpers import ANS, EOS, EOS2, PAD, LetterTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from openrlhf.rollout.text import continuation_text, end_of_sequence_ids, response_end, reward_text

TOK = LetterTokenizer()
CORPUS = ["hello world, the answer is 42 日本語 ünïcode 🙂 end"] * 4


def byte_level() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>", "<pad>"], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")


def metaspace() -> PreTrainedTokenizerFast:
    """Like a sentencepiece model: a leading blank of the text is a matter of the first token."""
    raw = Tokenizer(models.BPE(byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Metaspace(prepend_scheme="first")
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=["<eos>", "<pad>"]))
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")


@pytest.mark.parametrize("make", [byte_level, metaspace])
@pytest.mark.parametrize("text", ["hello world, the answer is 42", "日本語 ünïcode 🙂 end"])
def test_prompt_and_response_text_join_exactly_at_every_split(make: object, text: str) -> None:
    tokenizer = make()  # type: ignore[operator]
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    for split in range(1, len(ids)):
        prompt, response = ids[:split], ids[split:]
        if "\ufffd" in tokenizer.decode(prompt):
            continue  # inside a character: a prompt is whole text
        joined = tokenizer.decode(prompt) + reward_text(
            tokenizer, prompt, [*response, tokenizer.eos_token_id, tokenizer.pad_token_id], eos_ids={0}
        )
        assert joined == whole + "<eos>"


def test_continuation_of_nothing() -> None:
    assert continuation_text(TOK, [10], []) == ""
    assert continuation_text(TOK, [], [10, ANS]) == "a<ans>"
    assert continuation_text(TOK, [10], [11, ANS, EOS], skip_special_tokens=True) == "b"


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([ANS, 10, EOS, PAD, PAD], "<ans>a<eos>"),
        ([10, EOS2, 11], "a<eos2>"),
        ([10, PAD], "a"),
        ([EOS], "<eos>"),
    ],
)
def test_no_padding_and_one_end_marker(ids: list[int], text: str) -> None:
    assert reward_text(TOK, [12], ids, eos_ids={EOS, EOS2}) == text


def test_padding_with_the_end_token_leaves_one() -> None:
    tokenizer = LetterTokenizer()
    tokenizer.pad_token_id = EOS
    assert reward_text(tokenizer, [12], [10, EOS, EOS, EOS], eos_ids={EOS}) == "a<eos>"


def test_response_end() -> None:
    end = response_end([4, 9, 5], "length", {7, 9})
    assert (end.length, end.truncated, end.finish_reason) == (2, False, "stop")
    end = response_end([4, 5, 6], "length", {7, 9})
    assert (end.length, end.truncated, end.finish_reason) == (3, True, "length")
    end = response_end([7], "stop", {7, 9})
    assert (end.length, end.truncated, end.finish_reason) == (1, False, "stop")
    assert response_end([4], "abort", {7}).finish_reason == "abort"


def test_all_ids_that_end_a_sequence() -> None:
    assert end_of_sequence_ids(TOK) == {EOS}
    assert end_of_sequence_ids(TOK, [3, 4]) == {EOS, 3, 4}
    tokenizer = LetterTokenizer()
    tokenizer.eos_token_id = None
    assert end_of_sequence_ids(tokenizer) == frozenset()
