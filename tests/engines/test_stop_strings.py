"""Stop strings are found at the token at which vLLM's front end finds them, which decodes every one."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from openrlhf.engines.stop_strings import STOP_STRINGS, Endings, StopWatch, stop_strings
from openrlhf.utils.tiny_model import character_tokenizer

TEXT = (
    "The tool <search>weights of 4 bits</search> says: 12 + 3 = 15. Änderung über Größe, 数字は三です。 ok 🙂🙂 "
    "done!\n\nAnswer:\n```python\nprint('a  b')\n```\n</answer> <end> Observation: nothing\n"
)


def byte_level() -> PreTrainedTokenizerFast:
    """As that of Qwen and Llama 3: a character can be several tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator([TEXT * 3], trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    inner.add_special_tokens(["<|im_end|>", "<|tool|>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")


def sentence_pieces() -> PreTrainedTokenizerFast:
    """As that of Llama 2 and Mistral: bytes for unknown characters, and a text's first space is left out."""
    pieces = sorted(set("".join(TEXT.split()))) + ["</", "search", ">", "▁tool", "▁", "▁▁", "swer", "▁<", "ing"]
    known = [piece for piece in dict.fromkeys(pieces) if piece not in "数字🙂"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *known]
    inner = Tokenizer(models.BPE({t: i for i, t in enumerate(vocabulary)}, [], byte_fallback=True, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {"characters": character_tokenizer, "bytes": byte_level, "pieces": sentence_pieces}


def asked(prompt: list[int], strings: list[str], **options: Any) -> Any:
    sampling = SamplingParams(extra_args={STOP_STRINGS: strings}, **options)
    return SimpleNamespace(request_id="a", prompt_token_ids=prompt, prompt_embeds=None, sampling_params=sampling)


def by_every_token(tokenizer: Any, request: Any, strings: list[str], ids: list[int]) -> tuple[int, str] | None:
    shown = SimpleNamespace(**vars(request))
    options = {"min_tokens": request.sampling_params.min_tokens, "skip_special_tokens": False}
    shown.sampling_params = SamplingParams(stop=strings, **options)
    usual = IncrementalDetokenizer.from_new_request(tokenizer, shown)
    for count, token in enumerate(ids, 1):
        string = usual.update([token], False)
        if string is not None:
            return count, string
    return None


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_string_is_found_where_every_token_is_decoded(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    endings = Endings(tokenizer)
    draw = random.Random(kind)
    text_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    found = looked = seen = 0
    for _ in range(600):
        if draw.random() < 0.5:  # texts as they are, and tokens in any order, parts of characters among them
            start = draw.randrange(len(text_ids))
            ids = (text_ids[start:] + text_ids)[: draw.randint(1, 60)]
        else:
            ids = [draw.randrange(len(tokenizer)) for _ in range(draw.randint(1, 60))]
        whole = tokenizer.decode(ids)
        strings = []
        for _ in range(draw.randint(1, 3)):
            start = draw.randrange(max(len(whole), 1))
            strings.append(
                whole[start : start + draw.randint(1, 8)] if draw.random() < 0.7 else draw.choice("\n>。🙂`")
            )
        strings = [string for string in strings if string] or [" "]
        prompt = draw.sample(text_ids, 3)
        request = asked(prompt, strings, min_tokens=draw.choice([0, 0, 5]), skip_special_tokens=False)
        watch, place = StopWatch(request, stop_strings(request), endings), None
        for count in range(1, len(ids) + 1):
            before = watch._seen
            string = watch.found(ids[:count])
            looked, seen = looked + 1, seen + (watch._seen > before)
            if string is not None:
                place = (count, string)
                break
        assert place == by_every_token(tokenizer, request, strings, ids), (strings, ids)
        found += place is not None
    assert 150 < found < 590 and seen < looked


def test_only_tokens_that_can_end_a_string_are_looked_at() -> None:
    endings = Endings(byte_level())
    tag, every = endings.of(["x>"]), len(endings.tokenizer)
    assert tag is not None and 0 < len(tag - endings.parts) < 10 and endings.parts <= tag and len(tag) < every - 100
    assert {endings.tokenizer.convert_tokens_to_ids(token) for token in (">", "<|im_end|>", "<|tool|>")} <= tag
    assert endings.of(["x>", "a "]) is None
    assert endings.of(["x>", "y\n"]) == tag | (endings.of(["\n"]) or frozenset())


def test_requests_without_strings_are_not_watched() -> None:
    assert stop_strings(asked([1], ["x"])) == ["x"]
    for sampling in (None, SamplingParams(), SamplingParams(extra_args={"own": 1})):
        assert stop_strings(SimpleNamespace(sampling_params=sampling)) == []  # type: ignore[arg-type]
